"""Named sets from names in a column: many at little cost, limits before anything is written, no silent names."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from trieton.index.named_sets import MAX_NAME_BYTES, MAX_SETS
from trieton.index.static_index import StaticIndex
from trieton_builder.bundle.refresh import refresh
from trieton_builder.catalogue.set_table import read_set_table
from trieton_builder.indexing.trie import build_index

TRIETON = [sys.executable, "-m", "trieton_builder"]
MEASURED = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2)\n" + (
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)


@pytest.mark.case("W10")
@pytest.mark.parametrize("sorter", ["polars", "duckdb"])
def test_five_thousand_tags_cost_what_the_tags_cost_and_keep_the_memory_budget(tmp_path: Path, sorter: str) -> None:
    rng = np.random.default_rng(0)
    tags = rng.integers(0, 5000, (300_000, 3))
    codes = {f"code_{level}": rng.integers(0, 256, len(tags), dtype=np.uint8) for level in range(4)}
    names = [[f"tag_{tag}" for tag in row] for row in tags.tolist()]
    pl.DataFrame({"item_id": np.arange(len(tags)), **codes, "tags": names}).write_parquet(tmp_path / "items.parquet")
    build = [*TRIETON, "build", tmp_path / "items.parquet", "--codebook-sizes", "256,256,256,256", "--memory", "1GB"]
    build += ["--set-names", "tags", "--engine", sorter, "--out", tmp_path / "index"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *build], capture_output=True, text=True, check=True, timeout=150
    )
    assert int(done.stdout) * 1024 < 1e9
    index = StaticIndex.load(tmp_path / "index")
    assert len(index.sets.sizes()) == 5000
    for tag in (0, 17, 4999):
        members = index.catalog.item_ids[
            np.unpackbits(index.sets[f"tag_{tag}"], count=len(tags), bitorder="little") == 1
        ]
        assert sorted(members.tolist()) == np.flatnonzero((tags == tag).any(1)).tolist()


@pytest.mark.case("W13")
def test_names_beyond_a_limit_are_refused_with_its_number_before_anything_is_written(
    tmp_path: Path, tiny_bundle: Path
) -> None:
    def build(names: list[str]) -> subprocess.CompletedProcess[str]:
        count = len(names)
        table = {"item_id": range(count), "code_0": [i // 1000 for i in range(count)], "code_1": [0] * count}
        pl.DataFrame({**table, "title": names}).write_parquet(tmp_path / "items.parquet")
        command = [*TRIETON, "build", tmp_path / "items.parquet", "--codebook-sizes", "1000,1", "--set-names", "title"]
        return subprocess.run(
            [*command, "--out", tmp_path / "index"], capture_output=True, text=True, check=False, timeout=120
        )

    for names, limit in (
        (["x" * 550_000] * 2, MAX_NAME_BYTES),
        ([f"title {i}" for i in range(MAX_SETS + 1)], MAX_SETS),
    ):
        done = build(names)
        assert (done.returncode, os.listdir(tmp_path)) == (1, ["items.parquet"])
        assert "title" in done.stderr
        assert f"{limit:,}" in done.stderr or str(limit) in done.stderr
    titles = {"item_id": range(1000, 1300), "title": [f"film {i} " + "x" * MAX_NAME_BYTES for i in range(300)]}
    pl.DataFrame(titles).write_parquet(tmp_path / "sets.parquet")
    with pytest.raises(ValueError, match=r"column 'title'.*1,?024"):
        refresh(tiny_bundle, tmp_path / "sets.parquet", tmp_path / "new", set_names=["title"])
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def three() -> StaticIndex:
    return build_index(np.arange(3)[:, None], codebook_sizes=(3,), item_ids=[1, 2, 3])


@pytest.mark.case("W08")
@pytest.mark.parametrize("values", [("yes", "no"), ("Y", "N"), ("true ", "f"), ("7", "7")])
def test_words_that_are_no_booleans_never_become_sets_of_that_name(
    tmp_path: Path, three: StaticIndex, values: tuple[str, str]
) -> None:
    table = tmp_path / "stock.csv"
    table.write_text("item_id,in_stock\n" + f"1,{values[0]}\n2,{values[1]}\n")
    with pytest.raises(ValueError, match=r"column 'in_stock': row \d: .*--set-names in_stock"):
        read_set_table(table, three)
    # Whoever wants names says so.
    assert set(read_set_table(table, three, set_names=["in_stock"]).sets.sizes()) == {v.strip() for v in values}


@pytest.mark.case("W08")
def test_a_number_that_is_no_boolean_is_refused_with_its_row(tmp_path: Path, three: StaticIndex) -> None:
    pl.DataFrame({"item_id": [1, 2, 3], "in_stock": [7, 7, 7]}).write_parquet(tmp_path / "stock.parquet")
    with pytest.raises(ValueError, match=r"column 'in_stock': row 0: .* got 7"):
        read_set_table(tmp_path / "stock.parquet", three)


@pytest.mark.case("W46")
@pytest.mark.parametrize("lists", [[[], [], []], [None, None, None], [[], ["old"], []]])
def test_a_list_column_without_a_set_of_a_known_item_is_said_and_harmless_beside_a_good_one(
    tmp_path: Path, three: StaticIndex, lists: list
) -> None:
    ids = [1, 99, 3]  # the only name belongs to an item that the version does not have
    tags = pl.Series(lists, dtype=pl.List(pl.String))
    pl.DataFrame({"item_id": ids, "tags": tags}).write_parquet(tmp_path / "tags.parquet")
    with pytest.raises(ValueError, match=r"no item of this version is in any set of .*'tags'"):
        read_set_table(tmp_path / "tags.parquet", three)
    pl.DataFrame({"item_id": ids, "tags": tags, "hot": [1, 0, 0]}).write_parquet(tmp_path / "both.parquet")
    table = read_set_table(tmp_path / "both.parquet", three)
    assert (table.sets.sizes(), table.empty_columns) == ({"hot": 1}, ("tags",))


@pytest.mark.case("W36")
@pytest.mark.parametrize(("sorter", "begun"), [("duckdb", ".index.*/sorted-0"), ("polars", ".index.*")])
def test_sigterm_in_the_sort_of_a_build_ends_it_and_leaves_nothing(tmp_path: Path, sorter: str, begun: str) -> None:
    rng = np.random.default_rng(0)
    codes = {f"code_{level}": rng.integers(0, 256, 3_000_000, dtype=np.uint8) for level in range(5)}
    pl.DataFrame({"item_id": np.arange(3_000_000), **codes}).write_parquet(tmp_path / "items.parquet")
    command = [*TRIETON, "build", tmp_path / "items.parquet", "--codebook-sizes", ",".join(["256"] * 5)]
    command += ["--engine", sorter, "--memory", "512MB", "--out", tmp_path / "index"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.glob(begun)):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "interrupted" in said
    assert os.listdir(tmp_path) == ["items.parquet"]
