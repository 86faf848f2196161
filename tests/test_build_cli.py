"""`trieton build`, `trieton inspect` and `trieton semantic-ids`, as a user runs them."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from test_index import catalogues
from trie_walk import children_of
from trieton.bundle import Bundle
from trieton.index.static_index import StaticIndex
from trieton_builder.cli import app
from trieton_builder.cli.build import parse_memory
from trieton_builder.indexing.trie import build_index
from trieton_builder.report.inspection import floor_bytes, inspect_index
from trieton_builder.report.inspection_page import render_page
from typer.testing import CliRunner


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def ok(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def catalogue(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame({"item_id": np.arange(200) * 7} | {f"code_{i}": rng.integers(0, 8, 200) for i in range(3)})
    frame = frame.with_columns(fresh=pl.col("item_id") % 3 == 0, tags=pl.lit("a|b c"))
    frame.write_parquet(tmp_path / "items.parquet")
    return tmp_path / "items.parquet"


@pytest.mark.case("W55")
def test_inspect_cuts_no_number_in_a_pipe_of_80_columns(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2_000_000, (150_000, 2))
    codes[:120_000, 0] = 7
    name = "sold_in_the_last_thirty_days_and_delivered_within_two_working_days_or_sooner"
    sizes = (2_000_000, 2_000_000)
    index = build_index(codes, codebook_sizes=sizes, sets={name: np.ones(len(codes), np.bool_)})
    index.save(tmp_path / "index.safetensors")
    shown = subprocess.run(
        [sys.executable, "-m", "trieton_builder", "inspect", tmp_path / "index.safetensors"],
        capture_output=True, text=True, check=True, timeout=120, env={**os.environ, "COLUMNS": "80"},
    ).stdout  # fmt: skip
    stats = inspect_index(index)
    assert max(map(len, shown.splitlines())) > 80
    assert "…" not in shown
    for level in stats.levels:
        for number in (level.states, level.edges, level.codes_used, level.codebook_size, level.largest_fan_out):
            assert f"{number:,}" in shown, shown
    assert re.search(rf"{name} +150,000 +100\.0%", shown), shown


def test_build_writes_an_index_file_and_inspect_shows_it(catalogue: Path, tmp_path: Path) -> None:
    out = tmp_path / "index.safetensors"
    text = ok("build", catalogue, "-o", out, "--codebook-sizes", "8,8,8", "--set", "fresh", "--set-names", "tags")
    assert re.search(r"index\.safetensors: 200 items, [\d,]+ bytes, [\d.]+ s \(polars\)", text)
    index = StaticIndex.load(out)
    assert index.sets.sizes() == {"a": 200, "b c": 200, "fresh": 67}
    bare = run("build", catalogue, "-o", out, "--codebook-sizes", "8,8,8")
    assert bare.stderr == "boolean columns not made into named sets: fresh; to have them: --set fresh\n"
    report = json.loads(ok("build", catalogue, "-o", out, "--codebook-sizes", "8,8,8", "--engine", "duckdb", "--json"))
    assert report | {"seconds": 0, "bytes": 0, "path": ""} == {
        "path": "",
        "bytes": 0,
        "items": 200,
        "dropped_rows": 0,
        "engine": "duckdb",
        "seconds": 0,
    }
    assert "items share their semantic ID" in ok("inspect", out)
    shown = json.loads(ok("inspect", out, "--json", "--html", tmp_path / "page.html"))
    assert (shown["items"], shown["leaves"]) == (200, index.num_leaves)
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_build_with_a_retriever_writes_a_bundle(
    catalogue: Path, tmp_path: Path, make_tiny_retriever: Callable[..., Path]
) -> None:
    retriever = make_tiny_retriever((8, 8, 8))
    arguments = ["build", catalogue, "--retriever", retriever, "--set", "fresh", "--expression", "not fresh"]
    report = json.loads(ok(*arguments, "-o", tmp_path / "bundle", "--json"))
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.bundle_id == report["bundle_id"]
    assert bundle.index.num_items == 200
    assert bundle.manifest["expressions"] == ["not fresh"]
    assert list(bundle.manifest["provenance"]["catalogue"]) == ["items.parquet"]
    again = json.loads(ok(*arguments, "-o", tmp_path / "again", "--json", "--engine", "duckdb"))
    assert again["bundle_id"] == bundle.bundle_id
    assert "items" in ok("inspect", tmp_path / "bundle")
    assert sorted(p for p in os.listdir(tmp_path) if p != "items.parquet") == ["again", "bundle"]
    result = run(*arguments, "-o", tmp_path / "bundle")
    assert (result.exit_code, "exists already" in result.stderr) == (1, True)
    result = run(*arguments, "-o", tmp_path / "new", "--codebook-sizes", "8,8,9")
    assert "the retriever's token map has [8, 8, 8]" in result.stderr
    tokens = Bundle.open(tmp_path / "bundle").load_retriever().spec.token_map
    frame = pl.read_parquet(catalogue)
    mapped = [pl.Series(f"code_{i}", tokens.tokens(i, frame[f"code_{i}"].to_numpy())) for i in range(3)]
    frame.with_columns(mapped).write_parquet(tmp_path / "tokens.parquet")
    arguments[1] = tmp_path / "tokens.parquet"
    ok(*arguments, "-o", tmp_path / "from-tokens", "--retriever-tokens")
    assert (tmp_path / "from-tokens" / "index.safetensors").read_bytes() == (
        tmp_path / "bundle" / "index.safetensors"
    ).read_bytes()


def test_declared_token_offsets_and_end_token(tmp_path: Path) -> None:
    pl.DataFrame({"item_id": [1, 2], "codes": [[13, 21, 1], [13, 21, 34]]}).write_parquet(tmp_path / "a.parquet")
    arguments = ["--codebook-sizes", "8,8,8", "--token-offsets", "10,20,30", "--end-token", 1, "--variable-length"]
    ok("build", tmp_path / "a.parquet", "-o", tmp_path / "out", *arguments)
    index = StaticIndex.load(tmp_path / "out")
    assert index.leaf_codes(np.arange(2)).tolist() == [[3, 1, 4], [3, 1, -1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--codebook-sizes: how many codes has each level?"),
        (["--codebook-sizes", "8,x"], "--codebook-sizes: expected numbers such as 256,256,256, got '8,x'"),
        (["--codebook-sizes", "8,8,4"], r"items\.parquet: column 'code_2': row \d+, level 2: expected 0 <= code < 4"),
        (["--codebook-sizes", "8,8,8", "--memory", "much"], "memory: expected a size such as 4GB"),
        (["--codebook-sizes", "8,8,8", "--memory", "1MB"], "memory: expected at least 512 MB"),
        (["--codebook-sizes", "8,8,8", "--engine", "sql"], "engine: expected one of"),
        (["--codebook-sizes", "8,8,8", "--token-offsets", "1,2"], "--token-offsets: expected 3, one per level, got 2"),
        (["--codebook-sizes", "8,8,8", "--end-token", "1"], "--end-token: goes with --token-offsets"),
        (["--codebook-sizes", "8,8,8", "--retriever-tokens"], "--retriever-tokens: needs --retriever"),
        (["--codebook-sizes", "8,8,8", "--item-id", "asin"], "column 'asin': missing"),
        (["--codebook-sizes", "8,8,8", "--retriever", "/nowhere"], "nowhere"),
        (["--codebook-sizes", "8,8"], "2 codebook sizes, but 3 columns of codes"),
        (["--codebook-sizes", "8,8,8", "--code-pattern", "("], "code_pattern '\\(': no regular expression"),
        (["--codebook-sizes", "8,8,8", "--base-constraint", "fresh"], "--base-constraint: goes with --retriever"),
        (["--codebook-sizes", "8,8,8", "--expression", "fresh"], "--expression: goes with --retriever"),
        (["--codebook-sizes", "8,8,8", "--set-separator", ","], "--set-separator: goes with --set-names"),
        (["--codebook-sizes", "8,8,8", "--spark-conf", "a=b"], "--spark-conf: goes with --engine spark"),
        (["--codebook-sizes", "8,8,8", "--row-ids", "--text-ids"], "--text-ids: goes with ids, not --row-ids"),
    ],
)
def test_bad_arguments_are_one_line_and_write_nothing(
    catalogue: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = run("build", catalogue, "-o", tmp_path / "out", *arguments)
    assert result.exit_code == 1
    assert re.search(message, result.stderr)
    assert result.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["items.parquet"]


def test_memory_is_written_as_people_write_it() -> None:
    assert parse_memory("4GB") == 4_000_000_000
    assert parse_memory("4GiB") == 4 << 30
    assert parse_memory("1.5 g") == 1_500_000_000
    assert parse_memory("512M") == 512_000_000
    assert parse_memory("1000") == 1000


@settings(deadline=None, max_examples=60)
@given(catalogues())
def test_inspection_counts_what_the_trie_has(case: dict) -> None:
    index = build_index(**case)
    stats = inspect_index(index)
    children = children_of(set(map(tuple, _full_codes(index))))
    for level, shown in enumerate(stats.levels):
        fan_outs = sorted(len(codes) for prefix, codes in children.items() if len(prefix) == level and codes)
        assert (shown.states, shown.edges) == (len(fan_outs), sum(fan_outs))
        assert shown.largest_fan_out == max(fan_outs, default=0)
        if fan_outs:
            assert shown.mean_fan_out == pytest.approx(np.mean(fan_outs))
            assert shown.p99_fan_out == fan_outs[math.ceil(0.99 * len(fan_outs)) - 1]
        used = {c for prefix, codes in children.items() if len(prefix) == level for c in codes}
        assert shown.codes_used == len(used - {index.end_code(level)})
    assert sum(level.nbytes for level in stats.levels) == stats.trie_bytes
    assert sum(stats.items_per_leaf.values()) == stats.leaves
    assert sum(int(size) * count for size, count in stats.items_per_leaf.items()) == stats.items


def _full_codes(index: StaticIndex) -> list[list[int]]:
    codes = index.leaf_codes(np.arange(index.num_leaves))
    ends = np.array([index.end_code(level) for level in range(index.num_levels)])
    return np.where(codes < 0, ends, codes).tolist()


def test_the_floor_is_the_logarithm_of_how_many_sets_there_are() -> None:
    assert floor_bytes((4, 4), 5) == pytest.approx(math.log2(math.comb(16, 5)) / 8)
    assert floor_bytes((4, 4), 16) == floor_bytes((4, 4), 0) == 0
    assert floor_bytes((2048,) * 8, 10_000_000) / 1e7 == pytest.approx(8.27, abs=0.01)


@pytest.mark.parametrize("count", [0, 500])
def test_the_page_is_self_contained_and_always_the_same(count: int) -> None:
    rng = np.random.default_rng(0)
    sets = {f"<i>{i}": rng.random(count) < 0.5 for i in range(31)}
    index = build_index(rng.integers(0, 8, (count, 3)), codebook_sizes=[8] * 3, sets=sets)
    page = render_page(inspect_index(index), "a <title>")
    assert page == render_page(inspect_index(index), "a <title>")
    assert "a &lt;title&gt;" in page
    assert "<i>" not in page
    links = re.findall(r'(?:src|href)="([^"]+)"|url\(([^)]+)\)', page)
    assert all((a or b).startswith("#") for a, b in links)


def test_semantic_ids_are_made_and_built(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    np.save(tmp_path / "v.npy", vectors)
    text = ok("semantic-ids", tmp_path / "v.npy", "-o", tmp_path / "a.parquet", "--codebook-sizes", "8,8")
    sizes = re.search(r"--codebook-sizes ([\d,]+)", text)
    assert sizes
    ok("build", tmp_path / "a.parquet", "-o", tmp_path / "a.st", "--codebook-sizes", sizes[1])
    assert StaticIndex.load(tmp_path / "a.st").num_leaves == 300
    ids = [f"item {i}" for i in range(300)]
    pl.DataFrame({"name": ids, "v": vectors}).write_parquet(tmp_path / "v.parquet")
    columns = ["--vector-column", "v", "--item-id", "name"]
    again = ["semantic-ids", tmp_path / "v.parquet", "-o", tmp_path / "b.parquet", *columns, "--codebook-sizes", "8,8"]
    quality = json.loads(ok(*again, "--json"))
    assert quality["codebook_sizes"] == [int(size) for size in sizes[1].split(",")]
    assert 0 < quality["levels"][1]["error"] < quality["levels"][0]["error"] < 1
    a, b = pl.read_parquet(tmp_path / "a.parquet"), pl.read_parquet(tmp_path / "b.parquet")
    assert a.drop("item_id").equals(b.drop("item_id"))
    assert b["item_id"].to_list() == ids
    ok(*again, "--keep-collisions")
    assert pl.read_parquet(tmp_path / "b.parquet").columns == ["item_id", "code_0", "code_1"]
    for suffix in ("csv", "jsonl"):  # what was written is what the suffix says, and the build reads it
        again[3] = tmp_path / f"b.{suffix}"
        shown = ok(*again)
        hint = re.search(r"for trieton build with (.*)", shown)
        assert hint
        ok("build", again[3], "-o", tmp_path / "b.st", *hint[1].split())
        index = StaticIndex.load(tmp_path / "b.st")
        order = np.argsort(index.catalog.positions(ids))
        assert (index.num_leaves, index.catalog.is_text) == (300, True)
        assert index.leaf_codes(np.arange(300)).tolist() == a.drop("item_id").to_numpy()[order].tolist()


def test_without_a_collision_the_last_level_stays_and_is_explained(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.eye(6, dtype=np.float32) * np.arange(1, 7, dtype=np.float32))
    arguments = ["semantic-ids", tmp_path / "v.npy", "-o", tmp_path / "a.csv", "--codebook-sizes", "6"]
    text = ok(*arguments)
    assert "no items collide; the last level has one code, and room for collisions to come" in text
    assert text.endswith("for trieton build with --codebook-sizes 6,1\n")
    assert ok(*arguments, "--keep-collisions").endswith("for trieton build with --codebook-sizes 6\n")
    result = run(*arguments, "--seed", 10**20)
    assert (result.exit_code, result.stderr.startswith("trieton: seed: expected 0 to")) == (1, True)
    result = run(*arguments, "--vector-column", "v")
    assert result.stderr == "trieton: --vector-column: goes with a table\n"
    arguments[3] = tmp_path / "a.txt"
    assert "expected a name that ends in .parquet, .csv, .jsonl" in run(*arguments).stderr
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "v.npy"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: np.save(p, np.zeros(3, np.float32)), r"expected float32 or float64 \[N, D\], got float32"),
        (lambda p: np.save(p, np.zeros((3, 2), np.int64)), "expected float32 or float64"),
        (lambda p: np.save(p, np.array([[None]])), "not readable"),
        (lambda p: p.write_bytes(b"x"), "not readable"),
        (lambda p: np.save(p, np.array([[1.0, np.nan]] * 9)), "row 0 is not finite"),
        (lambda p: np.save(p, np.ones((2, 2))), r"codebook_sizes: expected one per level, 1 to 2"),
        (lambda p: None, "v.npy"),
    ],
)
def test_bad_vectors_are_one_line_and_write_nothing(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / "v.npy")
    result = run("semantic-ids", tmp_path / "v.npy", "-o", tmp_path / "out.parquet", "--codebook-sizes", "4,4")
    assert result.exit_code == 1
    assert re.search(message, result.stderr)
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"item_id": [1, 2]}, "column 'vector': missing"),
        ({"vector": [[1.0, 2.0], [1.0]], "item_id": [1, 2]}, "row 1: expected 2 numbers as in the first row, got 1"),
        ({"vector": [[1.0, None], [1.0, 2.0]], "item_id": [1, 2]}, "row 0: a number is missing"),
        ({"vector": [[1.0], None], "item_id": [1, 2]}, "row 1: nothing there"),
        ({"vector": ["a", "b"], "item_id": [1, 2]}, "expected lists of floats"),
    ],
)
def test_bad_vector_columns_are_named(tmp_path: Path, columns: dict, message: str) -> None:
    pl.DataFrame(columns).write_parquet(tmp_path / "v.parquet")
    result = run("semantic-ids", tmp_path / "v.parquet", "-o", tmp_path / "out.parquet", "--codebook-sizes", "2")
    assert (result.exit_code, bool(re.search(message, result.stderr))) == (1, True), result.stderr
