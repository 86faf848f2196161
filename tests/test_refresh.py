"""Refreshing the named sets of a bundle: new sets, everything else the same files."""

import json
import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from tiny_bundle import tiny_catalogue
from trieton.bundle import INDEX_FILES, Bundle, BundleError
from trieton.constraint.compile import compile_constraint
from trieton_builder.bundle import refresh as module
from trieton_builder.bundle.refresh import refresh
from trieton_builder.catalogue.set_table import read_set_table
from trieton_builder.cli import app
from trieton_builder.indexing.trie import build_index
from typer.testing import CliRunner


def allowed_ids(index, expression: str) -> set:
    plane = compile_constraint(index, expression)
    positions = np.arange(index.num_items)
    return set(index.catalog.ids(positions[plane.allows(positions)]).tolist())


def write_table(path: Path, table: dict) -> Path:
    frame = pl.DataFrame(table)
    if path.suffix == ".parquet":
        frame.write_parquet(path)
    else:
        frame.write_csv(path)
    return path


@pytest.fixture(scope="module")
def new_sets():
    """New facts about the items of the tiny bundle, in an order of their own."""
    ids = tiny_catalogue().ids
    rng = np.random.default_rng(5)
    shuffled = [ids[i] for i in rng.permutation(len(ids))]
    return {"item_id": shuffled, "fresh": rng.random(len(ids)) < 0.4, "few": rng.random(len(ids)) < 0.01}


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_refreshed_bundle_answers_by_the_new_sets_and_shares_the_old_files(tiny_bundle, tmp_path, new_sets, suffix):
    table = write_table(tmp_path / f"sets{suffix}", {**new_sets, "even and odd": [True, False] * 150})
    old = Bundle.open(tiny_bundle)
    out = tmp_path / "new"
    with pytest.raises(ValueError, match="needs sets that the table does not have"):
        refresh(tiny_bundle, table, out)  # the bundle compiles "even and not rare" when it is loaded
    assert not out.exists()
    made = refresh(tiny_bundle, table, out, keep_sets=True)
    new = Bundle.open(out)
    assert new.bundle_id == made.bundle_id != old.bundle_id
    assert made.sets == new.manifest["sets"] == new.index.sets.sizes()
    ids, fresh = np.array(new_sets["item_id"]), np.array(new_sets["fresh"])
    assert allowed_ids(new.index, "fresh") == set(ids[fresh].tolist())
    assert allowed_ids(new.index, "few or not fresh") == set(ids[np.array(new_sets["few"]) | ~fresh].tolist())
    assert allowed_ids(new.index, '"even and odd" and even') == set(ids[::2].tolist()) & allowed_ids(old.index, "even")
    for name in (*INDEX_FILES[:2], *(n for n in old.manifest["files"] if n.startswith("retriever/"))):
        assert os.path.samefile(out / name, tiny_bundle / name)
        assert new.manifest["files"][name] == old.manifest["files"][name]
    assert made.copied_bytes == 0
    assert new.manifest["expressions"] == old.manifest["expressions"]
    assert old.manifest == Bundle.open(tiny_bundle).manifest


def test_files_are_copied_where_the_filesystem_has_no_links(make_tiny_bundle, tmp_path, new_sets, monkeypatch):
    def no_links(source, target):
        raise OSError(95, "Operation not supported", source)

    bundle, table = make_tiny_bundle(), write_table(tmp_path / "sets.parquet", new_sets)
    linked = refresh(bundle, table, tmp_path / "linked")
    monkeypatch.setattr(module.os, "link", no_links)
    copied = refresh(bundle, table, tmp_path / "copied")
    assert (copied.linked_bytes, copied.copied_bytes) == (0, linked.linked_bytes)
    # The same content is the same bundle, however its bytes got there and whichever refresh it started from.
    assert copied.bundle_id == linked.bundle_id
    assert refresh(tmp_path / "linked", table, tmp_path / "again").bundle_id == linked.bundle_id


def test_a_table_of_other_items_takes_nothing_away_and_no_bundle_grows_inside_another(tiny_bundle, tmp_path, new_sets):
    strangers = write_table(tmp_path / "strangers.parquet", {"item_id": [1, 2], "fresh": [True, False]})
    with pytest.raises(ValueError, match="none of its 2 rows names an item"):
        refresh(tiny_bundle, strangers, tmp_path / "new", keep_sets=True)
    table = write_table(tmp_path / "sets.parquet", new_sets)
    with pytest.raises(ValueError, match="lies inside the bundle"):
        refresh(tiny_bundle, table, tiny_bundle / "inner", keep_sets=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sets.parquet", "strangers.parquet"]


def test_a_damaged_bundle_is_not_refreshed(make_tiny_bundle, tmp_path, new_sets):
    bundle, table = make_tiny_bundle(), write_table(tmp_path / "sets.parquet", new_sets)
    with open(bundle / INDEX_FILES[0], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(BundleError, match="checksum"):
        refresh(bundle, table, tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["sets.parquet"]


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
@pytest.mark.parametrize("text_ids", [False, True])
def test_lists_of_names_are_as_good_as_columns(tmp_path, suffix, text_ids):
    rng = np.random.default_rng(2)
    ids = [f"0{i}" for i in range(500)] if text_ids else list(range(500))
    names = ["fresh", "region_us", "Children's", "rare one"]
    lists = [
        [name for name, share in zip(names, (0.5, 0.3, 0.2, 0.01), strict=True) if rng.random() < share] for _ in ids
    ]
    lists[7] = ["fresh", "fresh"]
    index = build_index(rng.integers(0, 9, (500, 3)), codebook_sizes=(9,) * 3, item_ids=ids)
    cells = lists if suffix == ".parquet" else [" | ".join(cell) for cell in lists]
    path = write_table(tmp_path / f"sets{suffix}", {"id": ids[::-1], "tags": cells[::-1]})
    table = read_set_table(path, index, id_column="id", set_names=["tags"])
    want = {name: np.array([name in cell for cell in lists]) for name in names}
    assert table.sets.sizes() == {name: int(mask.sum()) for name, mask in sorted(want.items())}
    at = index.catalog.positions(ids)
    for name, mask in want.items():
        got = np.unpackbits(table.sets[name], bitorder="little", count=500).astype(bool)
        np.testing.assert_array_equal(got[at], mask)
    assert (table.num_rows, table.num_unknown, table.num_missing) == (500, 0, 0)


def test_rows_of_unknown_items_and_items_without_a_row_are_counted(tmp_path):
    index = build_index(np.arange(6)[:, None], codebook_sizes=(6,), item_ids=[10, 11, 12, 13, 14, 15])
    path = write_table(tmp_path / "sets.parquet", {"item_id": [15, 99, 11, 98], "a": [1, 1, 0, 1]})
    table = read_set_table(path, index)
    assert (table.num_rows, table.num_unknown, table.num_missing) == (4, 2, 4)
    assert table.sets.sizes() == {"a": 1}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"id": [1], "a": [True]}, r"expected a column 'item_id' of item ids, got \['id', 'a'\]"),
        ({"item_id": [1, 2]}, "expected columns of sets beside 'item_id', got none"),
        ({"item_id": ["1", "2"], "a": [True, False]}, "the item ids of this version are integers, got String"),
        ({"item_id": [1, None], "a": [True, False]}, "column 'item_id': row 1: the value is missing"),
        ({"item_id": [1, 2, 1], "a": [True, False, True]}, "item 1 stands in rows 0 and 2"),
        ({"item_id": [1, 2], "a": [True, None]}, "column 'a': row 1: the value is missing"),
        (
            {"item_id": [1, 2], "a": [0.5, 1.0]},
            "'a': expected booleans, 0 and 1, or lists of set names, got Float",
        ),
        ({"item_id": [1, 2], "a": [1, 2]}, "column 'a': row 1: expected true or false, or 0 and 1, got 2"),
        ({"item_id": [1, 2], "a": ["true", "maybe"]}, "column 'a': row 1: expected true or false, .* got 'maybe'"),
        ({"item_id": [2, 1], "a": [["x"], ["y", ""]]}, "column 'a': row 1: the name of a set is missing or empty"),
        ({"item_id": [1, 2], "x": [True, True], "tags": [["x"], []]}, "set 'x' stands in two columns, .* 'tags'"),
    ],
)
def test_a_faulty_table_is_refused_with_what_is_wrong(tmp_path, table, says):
    index = build_index(np.arange(3)[:, None], codebook_sizes=(3,), item_ids=[1, 2, 3])
    with pytest.raises(ValueError, match=says):
        read_set_table(write_table(tmp_path / "sets.parquet", table), index)


def test_booleans_and_lists_may_be_text_and_no_list_means_no_set(tmp_path):
    index = build_index(np.arange(3)[:, None], codebook_sizes=(3,), item_ids=[1, 2, 3])
    (tmp_path / "sets.csv").write_text("item_id,a,b,tags\n1,True,0,x|y\n2,False,1,\n3,TRUE,1,y\n")
    table = read_set_table(tmp_path / "sets.csv", index, set_names=["tags"])
    assert table.sets.sizes() == {"a": 2, "b": 2, "x": 1, "y": 2}
    path = write_table(tmp_path / "sets.parquet", {"item_id": [3, 2, 1], "tags": [["x"], None, []]})
    assert read_set_table(path, index).sets.sizes() == {"x": 1}
    (tmp_path / "sets.csv").write_text("item_id,a\n1,true\nseven,true\n")
    with pytest.raises(
        ValueError, match="column 'item_id': row 1: expected an integer item id of 64 bits, got 'seven'"
    ):
        read_set_table(tmp_path / "sets.csv", index)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    index = build_index(np.arange(3)[:, None], codebook_sizes=(3,))
    (tmp_path / "sets.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match="not readable"):
        read_set_table(tmp_path / "sets.parquet", index)
    (tmp_path / "sets.txt").write_text("item_id,a\n")
    with pytest.raises(ValueError, match=r"expected one of \.parquet.*, got .\.txt"):
        read_set_table(tmp_path / "sets.txt", index)
    with pytest.raises(ValueError, match="no such file"):
        read_set_table(tmp_path / "none.csv", index)


def test_the_command_reports_what_it_made_and_what_it_ignored(make_tiny_bundle, tmp_path, new_sets):
    ids = [*new_sets["item_id"][:-1], 77]
    table = write_table(tmp_path / "sets.parquet", {**new_sets, "item_id": ids})
    arguments = ["refresh", str(make_tiny_bundle()), "--sets", str(table), "--out"]
    run = CliRunner().invoke(app, [*arguments, str(tmp_path / "a"), "--json"])
    assert run.exit_code == 0, run.output
    made = json.loads(run.stdout)
    assert made["bundle_id"] == Bundle.open(tmp_path / "a").bundle_id
    assert (made["num_unknown"], made["num_missing"]) == (1, 1)
    run = CliRunner().invoke(app, [*arguments, str(tmp_path / "b")])
    assert run.exit_code == 0, run.output
    assert "1 of 300 rows name items that this version does not have" in " ".join(run.stdout.split())
    run = CliRunner().invoke(app, [*arguments, str(tmp_path / "b")])
    assert run.exit_code == 1
    assert "exists already" in run.stderr
