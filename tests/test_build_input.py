"""Catalogues from files: every accepted form gives the same index, every fault names file, column and row."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from trieton.index.static_index import StaticIndex
from trieton.retriever.spec import TokenMap
from trieton_builder.catalogue.columns import CatalogError, Columns
from trieton_builder.catalogue.keys import KeyLayout
from trieton_builder.catalogue.read import CatalogSource
from trieton_builder.indexing.build_file import build_file
from trieton_builder.indexing.trie import build_index

SIZES = [8, 6, 7]
OFFICE = Path(__file__).parents[2] / "shared" / "data" / "office" / "items.csv"


def catalogue(count: int = 40) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "codes": np.stack([rng.integers(0, size, count) for size in SIZES], axis=1),
        "item_ids": rng.permutation(count) * 3,
        "sets": {"fresh": rng.random(count) < 0.5, "us": rng.random(count) < 0.3},
    }


def by_level(case: dict[str, Any]) -> pl.DataFrame:
    columns = {"item_id": case["item_ids"]} | {f"code_{level}": case["codes"][:, level] for level in range(3)}
    return pl.DataFrame(columns | case["sets"])


def build(path: Path | str, out: Path, *, sizes: list[int] = SIZES, tokens: TokenMap | None = None, **columns: Any):
    source = CatalogSource(str(path), KeyLayout.of(sizes), Columns(**columns), tokens)
    build_file(source, out)
    return StaticIndex.load(out)


def same(index: StaticIndex, case: dict[str, Any], tmp_path: Path) -> bool:
    wanted = build_index(case["codes"], codebook_sizes=SIZES, item_ids=case["item_ids"], sets=case.get("sets"))
    return wanted.save(tmp_path / "w") == index.save(tmp_path / "i")


def test_a_column_per_level_or_one_list_column(tmp_path: Path) -> None:
    case = catalogue()
    frame = by_level(case)
    frame.write_parquet(tmp_path / "levels.parquet")
    lists = frame.select("item_id", "fresh", "us", codes=pl.concat_list("code_0", "code_1", "code_2"))
    lists.write_parquet(tmp_path / "lists.parquet")
    array = lists.with_columns(pl.col("codes").list.to_array(3).alias("semantic_id")).drop("codes")
    array.rename({"item_id": "asin"}).write_parquet(tmp_path / "array.parquet")
    sets = ("fresh", "us")
    assert same(build(tmp_path / "levels.parquet", tmp_path / "o", set_columns=sets), case, tmp_path)
    assert same(build(tmp_path / "lists.parquet", tmp_path / "o", set_columns=sets), case, tmp_path)
    other = {"codes": ("semantic_id",), "item_id": "asin", "set_columns": sets}
    assert same(build(tmp_path / "array.parquet", tmp_path / "o", **other), case, tmp_path)
    reversed_names = frame.rename({f"code_{level}": f"c{2 - level}" for level in range(3)})
    reversed_names.write_parquet(tmp_path / "named.parquet")
    named = build(tmp_path / "named.parquet", tmp_path / "o", codes=("c2", "c1", "c0"), set_columns=sets)
    assert same(named, case, tmp_path)


def test_a_folder_and_a_glob_read_their_files_in_order(tmp_path: Path) -> None:
    case = catalogue()
    case["sets"] = {}
    frame = by_level(case)
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(4):
        frame[number * 10 : (number + 1) * 10].write_parquet(folder / f"part-{number}.parquet")
    frame[:0].write_parquet(folder / "part-9.parquet")
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.parquet.crc").touch()
    assert same(build(folder, tmp_path / "o"), case, tmp_path)
    assert same(build(folder / "part-*.parquet", tmp_path / "o"), case, tmp_path)
    half = {"codes": case["codes"][:20], "item_ids": case["item_ids"][:20]}
    assert same(build(folder / "part-[01].parquet", tmp_path / "o"), half, tmp_path)


def test_csv_and_json_in_the_forms_people_have(tmp_path: Path) -> None:
    case = catalogue()
    by_level(case).write_csv(tmp_path / "a.csv")
    assert same(build(tmp_path / "a.csv", tmp_path / "o", set_columns=("fresh", "us")), case, tmp_path)
    case["sets"] = {}
    pairs = {str(item): row for item, row in zip(case["item_ids"].tolist(), case["codes"].tolist(), strict=True)}
    (tmp_path / "a.json").write_text(json.dumps(pairs))
    assert same(build(tmp_path / "a.json", tmp_path / "o"), case, tmp_path)
    lines = [json.dumps({"item_id": int(item), "codes": row}) for item, row in pairs.items()]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert same(build(tmp_path / "a.jsonl", tmp_path / "o"), case, tmp_path)
    tagged = {item: [f"<{'abc'[level]}_{code}>" for level, code in enumerate(row)] for item, row in pairs.items()}
    (tmp_path / "tagged.json").write_text(json.dumps(tagged))
    assert same(build(tmp_path / "tagged.json", tmp_path / "o", code_pattern=r"<[a-c]_(\d+)>"), case, tmp_path)
    for name, style in (("brackets", "[{}, {}, {}]"), ("spaces", "{} {} {}"), ("tags", "<a_{}><b_{}><c_{}>")):
        rows = [f'{item},"{style.format(*row)}"' for item, row in pairs.items()]
        (tmp_path / f"{name}.csv").write_text("\n".join(["item_id,codes", *rows]))
        pattern = r"<[a-c]_(\d+)>" if name == "tags" else None
        assert same(build(tmp_path / f"{name}.csv", tmp_path / "o", code_pattern=pattern), case, tmp_path)


def test_text_ids_are_declared_where_files_have_no_types(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("item_id,code_0,code_1,code_2\n007,1,2,3\nB0X,1,2,4\n")
    with pytest.raises(CatalogError, match=r"a\.csv: column 'item_id': row 0: expected an integer item id .*'007'"):
        build(tmp_path / "a.csv", tmp_path / "o")
    index = build(tmp_path / "a.csv", tmp_path / "o", text_ids=True)
    assert index.catalog.ids(np.arange(2)).tolist() == ["007", "B0X"]
    by_level(catalogue()).write_parquet(tmp_path / "typed.parquet")
    with pytest.raises(CatalogError, match=r"typed\.parquet: column 'item_id': declared as strings, got Int64"):
        build(tmp_path / "typed.parquet", tmp_path / "o", text_ids=True)
    (tmp_path / "a.json").write_text('{"x": [1, 2, 3], "y": [1, 2, 4]}')
    assert build(tmp_path / "a.json", tmp_path / "o", text_ids=True).catalog.positions(["y", "x", "z"]).tolist() == [
        1,
        0,
        -1,
    ]


def test_rows_number_the_items_when_there_are_no_ids(tmp_path: Path) -> None:
    case = catalogue()
    by_level(case).drop("item_id").write_parquet(tmp_path / "a.parquet")
    case |= {"item_ids": None, "sets": {}}
    assert same(build(tmp_path / "a.parquet", tmp_path / "o", item_id=None), case, tmp_path)


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize("kind", [pl.Boolean, pl.Int8, pl.String])
def test_a_set_is_a_column_of_booleans_or_of_0_and_1_whatever_the_file(
    tmp_path: Path, suffix: str, kind: type[pl.DataType]
) -> None:
    case = catalogue()
    frame = by_level(case).with_columns(pl.col("fresh", "us").cast(pl.Int8).cast(kind))
    path = tmp_path / f"a.{suffix}"
    {"parquet": frame.write_parquet, "csv": frame.write_csv, "jsonl": frame.write_ndjson}[suffix](path)
    assert same(build(path, tmp_path / "o", set_columns=("fresh", "us")), case, tmp_path)
    unused = CatalogSource(str(path), KeyLayout.of(SIZES), Columns(set_columns=("us",))).unused_booleans()
    assert unused == (["fresh"] if kind == pl.Boolean else [])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", r"code_pattern '\(': no regular expression: unclosed group"),
        ("a", r"code_pattern 'a': expected one group, around the number, as in .*; got 0"),
        (r"(\w)_(\d+)", "expected one group, around the number, as in .*; got 2"),
    ],
)
def test_a_code_pattern_that_cannot_name_a_code_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Columns(code_pattern=pattern)


@pytest.mark.parametrize("form", ["lists", "text"])
def test_one_column_of_set_names_makes_named_sets(tmp_path: Path, form: str) -> None:
    case = catalogue()
    frame = by_level(case)
    names: list = [[n for n, mask in case["sets"].items() if mask[row]] for row in range(40)]
    if form == "text":
        names = [" | ".join(row) or None for row in names]
    frame.drop("fresh", "us").with_columns(pl.Series("tags", names)).write_parquet(tmp_path / "a.parquet")
    assert same(build(tmp_path / "a.parquet", tmp_path / "o", set_names="tags"), case, tmp_path)
    mixed = frame.drop("us").with_columns(pl.Series("tags", [["us"] if m else [] for m in case["sets"]["us"]]))
    mixed.write_parquet(tmp_path / "b.parquet")
    both = build(tmp_path / "b.parquet", tmp_path / "o", set_names="tags", set_columns=("fresh",))
    assert same(both, case, tmp_path)
    frame.with_columns(pl.Series("tags", [["fresh"]] * 40)).write_parquet(tmp_path / "c.parquet")
    with pytest.raises(CatalogError, match="set 'fresh' is a column and also a name in column 'tags'"):
        build(tmp_path / "c.parquet", tmp_path / "o", set_names="tags", set_columns=("fresh",))


@pytest.mark.case("I12")
def test_level_local_codes_and_declared_tokens_give_the_same_index(tmp_path: Path) -> None:
    case = catalogue()
    case["sets"] = {}
    maps = [
        TokenMap.contiguous(SIZES, first=100),
        TokenMap((tuple(range(50, 58)), tuple(reversed(range(60, 66))), tuple(range(70, 84, 2)))),
    ]
    for tokens in maps:
        mapped = np.stack([tokens.tokens(level, case["codes"][:, level]) for level in range(3)], axis=1)
        by_level(case | {"codes": mapped}).write_parquet(tmp_path / "tokens.parquet")
        assert same(build(tmp_path / "tokens.parquet", tmp_path / "o", tokens=tokens), case, tmp_path)
        with pytest.raises(CatalogError, match=r"code_0': row \d+, level 0: expected 0 <= code < 8.*declare their"):
            build(tmp_path / "tokens.parquet", tmp_path / "x")
        by_level(case).write_parquet(tmp_path / "local.parquet")
        with pytest.raises(
            CatalogError, match=r"local\.parquet: column 'code_0': row 0: level 0: expected.*level-local"
        ):
            build(tmp_path / "local.parquet", tmp_path / "x", tokens=tokens)
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match=r"token map: its levels have \[8, 6, 7\] tokens, the codebooks \[8, 6, 8\]"):
        build(tmp_path / "local.parquet", tmp_path / "x", tokens=maps[0], sizes=[8, 6, 8])


@pytest.mark.case("I13")
def test_semantic_ids_of_different_length_have_to_be_declared(tmp_path: Path) -> None:
    frame = pl.DataFrame({"item_id": [1, 2], "codes": [[3, 1], [3, 1, 4]]})
    frame.write_parquet(tmp_path / "lists.parquet")
    levels = pl.DataFrame({"item_id": [1, 2], "code_0": [3, 3], "code_1": [1, 1], "code_2": [None, 4]})
    levels.write_parquet(tmp_path / "levels.parquet")
    tokens = TokenMap.contiguous(SIZES, first=10, end_token=1)
    ended = pl.DataFrame({"item_id": [1, 2], "codes": [[13, 19, 1], [13, 19, 28]]})
    ended.write_parquet(tmp_path / "tokens.parquet")
    wanted = build_index(np.array([[3, 1, 0], [3, 1, 4]]), codebook_sizes=SIZES, item_ids=[1, 2], lengths=[2, 3])
    digest = wanted.save(tmp_path / "wanted")
    for name in ("lists", "levels", "tokens"):
        declared = {"tokens": tokens} if name == "tokens" else {}
        with pytest.raises(CatalogError, match=rf"{name}\.parquet: column .*: row 0: "):
            build(tmp_path / f"{name}.parquet", tmp_path / "o", **declared)
        index = build(tmp_path / f"{name}.parquet", tmp_path / "o", variable_length=True, **declared)
        assert index.save(tmp_path / "i") == digest


BAD_TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "null code": ({"code_1": [1, None, 2]}, r"column 'code_1': row 1: a code is missing"),
    "missing column": ({"code_1": None}, r"3 codebook sizes, but 1 columns of codes: code_0 to code_0"),
    "too few columns": ({"code_2": None}, r"3 codebook sizes, but 2 columns of codes: code_0 to code_1"),
    "too many columns": ({"code_3": [1, 2, 3]}, r"3 codebook sizes, but 4 columns of codes: code_0 to code_3; give"),
    "no columns": ({f"code_{i}": None for i in range(3)}, r"column 'code_0': missing; the file has item_id$"),
    "text codes": ({"code_1": ["1", "x", "2"]}, r"column 'code_1': row 1: expected an integer of 64 bits, got 'x'"),
    "float codes": ({"code_1": [1.0, 2.0, 3.5]}, r"column 'code_1': row 0: expected integers, got Float64 \(1\.0"),
    "all null": ({"code_1": [None] * 3}, r"column 'code_1': row 0: a code is missing"),
    "too large": ({"code_1": [1, 2, 6]}, r"column 'code_1': row 2, level 1: expected 0 <= code < 6, got 6"),
    "negative": ({"code_0": [1, -2, 6]}, r"column 'code_0': row 1, level 0: expected 0 <= code < 8, got -2"),
    "null id": ({"item_id": [1, 2, None]}, r"column 'item_id': row 2: the item id is missing"),
    "float id": ({"item_id": [1.0, 2.0, 3.0]}, r"column 'item_id': expected integers or strings, got Float64"),
    "huge id": ({"item_id": pl.Series([1, 2, 2**63], dtype=pl.UInt64)}, r"column 'item_id': row 2: .*64 bits, got 922"),
    "empty id": ({"item_id": ["a", "", "b"]}, r"column 'item_id': row 1: expected an item id of 1 to 255 bytes"),
    "zero rows": ({"item_id": []}, r"no rows; an empty catalogue is not built from files"),
    "null set": ({"fresh": [True, None, False]}, r"column 'fresh': row 1: the value is missing"),
    "number set": ({"fresh": [1, 0, 2]}, r"column 'fresh': row 2: expected true or false, or 0 and 1, got 2"),
    "word set": ({"fresh": ["true", "0", "x"]}, r"column 'fresh': row 2: expected true or false, or 0 and 1, got 'x'"),
    "float set": ({"fresh": [1.0, 0.0, 1.0]}, r"column 'fresh': expected booleans, or 0 and 1, got Float64"),
}


@pytest.mark.case("I14")
@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_bad_parquet_file_is_one_clear_error_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    change, message = BAD_TABLES[name]
    columns: dict[str, Any] = {"item_id": [1, 2, 3], "code_0": [1, 2, 3], "code_1": [1, 2, 3], "code_2": [1, 2, 3]}
    columns = {key: value for key, value in (columns | change).items() if value is not None}
    frame = pl.DataFrame(columns) if name != "zero rows" else pl.DataFrame({k: [1] for k in columns})[:0]
    frame.write_parquet(tmp_path / "bad.parquet")
    with pytest.raises(CatalogError, match=message) as caught:
        build(tmp_path / "bad.parquet", tmp_path / "out", set_columns=("fresh",) if "fresh" in change else ())
    assert "bad.parquet" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["bad.parquet"]


@pytest.mark.case("I14")
@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([[1, 2, 3], None], "column 'codes': row 1: codes are missing"),
        ([[1, 2, 3], [1, None, 3]], "column 'codes': row 1: a code is missing"),
        ([[1, 2, 3], [1, 2]], "column 'codes': row 1: expected 3 codes, got 2; different lengths"),
        ([[1, 2, 3], [1, 2, 3, 4]], "column 'codes': row 1: expected 3 codes, got 4"),
        ([[1, 2, 3], []], "column 'codes': row 1: expected 3 codes, got 0"),
        ([["1", "2", "3"], ["1", "y", "3"]], "column 'codes': row 1: expected an integer of 64 bits, got 'y'"),
        ([[1.0, 2.0, 3.0]] * 2, "column 'codes': row 0: expected integers, got Float64"),
        ([1, 2], "column 'codes': row 0: expected a list of 3 codes, got Int64"),
        (["1 2 3", "1 2 x"], "column 'codes': row 1: expected an integer of 64 bits, got 'x'"),
    ],
)
def test_a_bad_list_column_is_one_clear_error(tmp_path: Path, codes: list, message: str) -> None:
    pl.DataFrame({"item_id": [1, 2], "codes": codes}).write_parquet(tmp_path / "bad.parquet")
    with pytest.raises(CatalogError, match=message):
        build(tmp_path / "bad.parquet", tmp_path / "out")
    assert os.listdir(tmp_path) == ["bad.parquet"]


@pytest.mark.case("I14")
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[1, 2]", "expected one JSON object of item -> codes"),
        ("a.json", "{", "not readable"),
        ("a.json", '{"1": [1, 2, 3], "2": "x"}', r"item '2' \(row 1\): expected a list of integers, got 'x'"),
        ("a.json", '{"1": [1, 2, 3], "2": [1, 2, true]}', r"item '2' \(row 1\): expected a list of integers"),
        ("a.json", '{"1": 5}', "item '1' .*expected a list"),
        ("a.json", '{"1": [1, 2, 99999999999999999999]}', "codes beyond 64 bits"),
        ("a.json", "{}", "no rows"),
        ("a.csv", "", "not readable"),
        ("a.csv", "item_id,code_0,code_1,code_2\n1,2,3,\n", "column 'code_2': row 0: a code is missing"),
        ("a.csv", "item_id,code_0,code_1,code_2\n1,2,3,4.0\n", "column 'code_2': row 0: .*got '4.0'"),
        ("a.parquet", "not parquet", "not readable"),
        ("a.xlsx", "", r"expected one of \.parquet"),
    ],
)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CatalogError, match=message) as caught:
        build(tmp_path / name, tmp_path / "out")
    assert name in str(caught.value)
    assert os.listdir(tmp_path) == [name]


def test_a_fault_beyond_the_first_batch_and_file_names_its_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trieton_builder.catalogue.tables.BATCH_ROWS", 16)
    frame = by_level(catalogue(100)).drop("fresh", "us")
    (tmp_path / "in").mkdir()
    frame[:50].write_parquet(tmp_path / "in" / "a.parquet")
    bad = frame[50:].with_columns(pl.when(pl.int_range(50) == 37).then(6).otherwise("code_1").alias("code_1"))
    bad.write_parquet(tmp_path / "in" / "b.parquet")
    with pytest.raises(
        CatalogError, match=r"b\.parquet: column 'code_1': row 37, level 1: expected 0 <= code < 6, got 6"
    ):
        build(tmp_path / "in", tmp_path / "out")


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="no such file or folder, and as a pattern it matches no file"):
        build(tmp_path / "none*.parquet", tmp_path / "out")
    with pytest.raises(CatalogError, match=r"no \.parquet.* file in this folder"):
        build(tmp_path, tmp_path / "out")
    (tmp_path / "a.csv").write_text("item_id,code_0\n1,2\n")
    with pytest.raises(CatalogError, match="expected one list column or 3 columns of codes, got 2"):
        build(tmp_path / "a.csv", tmp_path / "out", codes=("code_0", "x"))


@pytest.mark.skipif(not OFFICE.exists(), reason="needs ../shared beside the checkout")
def test_a_real_catalogue_with_collisions(tmp_path: Path) -> None:
    index = build(OFFICE, tmp_path / "o", sizes=[256, 256, 256])
    assert (index.num_items, index.num_leaves) == (3459, 3444)
