"""Files as they lie on people's disks: read in full, or refused by name; never with fewer items than there are."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pytest
from test_build_input import SIZES, build, by_level, catalogue
from trieton.index.static_index import StaticIndex
from trieton_builder.catalogue.columns import CatalogError, Columns
from trieton_builder.catalogue.files import find_files
from trieton_builder.catalogue.keys import KeyLayout
from trieton_builder.catalogue.read import CatalogSource
from trieton_builder.catalogue.set_table import read_set_table
from trieton_builder.catalogue.tables import read_table
from trieton_builder.catalogue.vectors import read_vectors
from trieton_builder.cli import app
from trieton_builder.indexing.build_file import build_file
from trieton_builder.indexing.trie import build_index
from typer.testing import CliRunner

ROWS = "item_id,code_0,code_1,code_2\n1,1,2,3\n2,1,2,4\n"
LITERAL = ["exp[1]", "a*b?", "{x,y}", "p%20q ü", "back\\slash", "row=5", "~"]


def ids_of(index: StaticIndex) -> list:
    return sorted(index.catalog.ids(np.arange(index.num_items)).tolist())


def refused(path: Path | str, out: Path, match: str, **columns: Any) -> None:
    with pytest.raises(CatalogError, match=match) as caught:
        build(path, out, **columns)
    assert "\n" not in str(caught.value)
    assert not out.exists()


@pytest.mark.case("W01")
@pytest.mark.parametrize("engine", ["polars", "duckdb"])
@pytest.mark.parametrize("name", LITERAL)
def test_a_path_that_exists_is_no_pattern(
    tmp_path: Path, name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = by_level(catalogue())
    for folder in (name, "exp1", "aXbY", "plain"):  # what the name would match as a pattern holds other rows
        (tmp_path / folder).mkdir()
        rows = frame if folder in (name, "plain") else frame[:3]
        rows.write_parquet(tmp_path / folder / "items.parquet")
        rows.write_ndjson(tmp_path / folder / "items.jsonl")
        rows.write_csv(tmp_path / folder / "items.csv")
    build(tmp_path / "plain" / "items.parquet", tmp_path / "wanted", set_columns=("us",))
    monkeypatch.chdir(tmp_path)  # a relative path may begin with ~
    columns = Columns(set_columns=("us",))
    for file in ("items.parquet", "items.jsonl", "items.csv"):
        source = CatalogSource(f"{name}/{file}", KeyLayout.of(SIZES), columns)
        out = Path(name, f"index{name}.st")
        build_file(source, out, engine=engine, work_dir=name, memory=1 << 29)
        assert out.read_bytes() == Path("wanted").read_bytes()
        assert len(read_table(Path(name, file)).frame) == 40  # what `refresh --sets` reads with
    pattern = CatalogSource(f"{name}/it*.parquet", KeyLayout.of(SIZES), columns)
    assert [file.path for file in pattern.files] == [Path(name, "items.parquet")]


@pytest.mark.case("W01")
def test_what_a_killed_build_left_is_found_by_its_literal_name(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text(ROWS)
    build(tmp_path / "items.csv", tmp_path / "i[1].st")
    (left,) = {p.name for p in tmp_path.iterdir()} - {"items.csv"}
    host = os.uname().nodename
    (tmp_path / f".{left}.building-{host}-999999999-x").mkdir()
    build(tmp_path / "items.csv", tmp_path / "i[1].st")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i[1].st", "items.csv"]


@pytest.mark.case("W02")
@pytest.mark.parametrize(
    "hidden", [".ipynb_checkpoints/items-checkpoint.csv", "_temporary/0/part.csv", "a/_x/b/c.csv", ".c.csv", "a/_c.csv"]
)
def test_hidden_files_and_folders_are_skipped_at_any_depth(tmp_path: Path, hidden: str) -> None:
    data = tmp_path / ".cache" / "_data"  # what the input itself is called does not matter
    (data / hidden).parent.mkdir(parents=True)
    (data / hidden).write_text(ROWS + "3,1,2,5\n")
    refused(data, tmp_path / "x", "no .parquet.* file in this folder")
    (data / "items.csv").write_text(ROWS)
    assert ids_of(build(data, tmp_path / "o")) == [1, 2]
    assert ids_of(build(data / "**" / "*.csv", tmp_path / "o")) == [1, 2]
    assert ids_of(build(data / hidden, tmp_path / "o")) == [1, 2, 3]
    pattern = data / hidden.replace(".csv", "*") if "/" not in hidden else data / hidden.split("/")[0] / "**" / "*.csv"
    if hidden[0] in "._":  # a pattern that names it asks for it
        assert ids_of(build(pattern, tmp_path / "o")) == [1, 2, 3]


def write(path: Path, first: int, count: int = 3) -> None:
    frame = pl.DataFrame({"item_id": range(first, first + count), "codes": [[1, 2, n % 7] for n in range(count)]})
    name = path.name.lower()
    if "parquet" in name:
        frame.write_parquet(path, compression="gzip")
        return
    if "csv" in name:
        text = frame.with_columns(pl.col("codes").cast(pl.List(pl.String)).list.join(" ")).write_csv()
    elif "map" in name:
        text = json.dumps({str(item): codes for item, codes in frame.rows()})
    else:
        text = frame.write_ndjson()
    if name.endswith((".gz", ".gzip")):
        half = len(text) // 2  # two members, as `cat a.gz b.gz` makes them
        path.write_bytes(gzip.compress(text[:half].encode()) + gzip.compress(text[half:].encode()))
    elif name.endswith((".zst", ".zstd")):
        as_it_is = "FORMAT csv, HEADER false, DELIMITER '\x01', QUOTE '', COMPRESSION zstd"
        duckdb.sql(f"COPY (SELECT unnest({text.splitlines()!r})) TO '{path}' ({as_it_is})")
    else:
        path.write_text(text)


@pytest.mark.case("W03")
@pytest.mark.parametrize(
    "name",
    ["p.csv.gz", "p.CSV.GZ", "p.csv.zst", "p.parquet.gzip", "p.parquet.snappy", "p.PARQUET", "p.json.gz", "p.jsonl.zst",
     "p.json", "map.json", "map.json.gz", "map.json.zst", "p.ndjson.gzip"],
)  # fmt: skip
def test_compressed_files_and_unexpected_suffixes_are_read_beside_others(tmp_path: Path, name: str) -> None:
    data = tmp_path / "in"
    data.mkdir()
    write(data / "a.csv", 1)
    write(data / name, 4)
    assert ids_of(build(data, tmp_path / "o")) == [1, 2, 3, 4, 5, 6]
    assert ids_of(build(data / name, tmp_path / "o")) == [4, 5, 6]


@pytest.mark.case("W03")
@pytest.mark.parametrize("name", ["p.csv.bz2", "p.txt", "p", "p.csv.bak", "p.jsonl.xz", "README.md", "p.gz", "p.csv~"])
def test_a_folder_with_a_file_of_another_kind_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    data = tmp_path / "in"
    data.mkdir()
    write(data / "a.csv", 1)
    (data / name).write_text("x")
    refused(data, tmp_path / "o", rf"in/{name}: expected one of .*pattern such as '.*/in/\*\.csv'")
    assert ids_of(build(data / "*.csv", tmp_path / "o")) == [1, 2, 3]


def test_what_is_damaged_or_cannot_be_rows_is_refused_by_name(tmp_path: Path) -> None:
    def check(name: str, content: bytes, match: str) -> None:
        data = tmp_path / "in"
        data.mkdir(exist_ok=True)
        write(data / "a.csv", 1)
        (data / name).write_bytes(content)
        refused(data, tmp_path / "o", f"{name}: {match}")
        (data / name).unlink()

    packed = gzip.compress((ROWS + "".join(f"{n},1,2,3\n" for n in range(9, 9999))).encode())
    check("b.csv.gz", packed[: len(packed) // 2], "not readable: .*end of file")
    check("b.csv.gz", packed[:-8] + b"\0" * 8, "not readable: .*checksum")
    check("b.csv", "item_id,codes\n7,1 2 3\n".encode("utf-16"), "expected UTF-8, got UTF-16")
    check("b.jsonl", '{"item_id": 7, "codes": [1, 2, 3]}'.encode("utf-16"), "expected UTF-8, got UTF-16")
    check("b.csv", b"item_id,codes\n\xe9,1 2 3\n", "not readable: invalid utf-8")
    check("b.csv", b"", "not readable: the file is empty")
    check("b.jsonl", b"", "not readable: the file is empty")
    check("b.parquet", b"", "not readable")
    check("b.parquet", gzip.compress(b"PAR1"), "Parquet inside another compression; unpack it first")
    check("b.csv", b"item_id;codes\n7;1 2 3\n", "column .* missing; .*separated by ';', expected commas")
    check("b.csv", b"item_id,codes\n7,1 2 3,4\n", "not readable: found more fields")
    check("b.csv", b"item_id,codes\r7,1 2 3\r", "column 'code_0': missing; .*\\\\r")
    check("b.jsonl", b'{"item_id": 7, "codes": [1, 2, 3]}\n{"item_id": 8, "cod', "not readable")
    check("b.jsonl", b'[{"item_id": 7, "codes": [1, 2, 3]}]', "not readable")
    check("b.json", b'[{"item_id": 7, "codes": [1, 2, 3]}]', "expected one JSON object of item -> codes")
    check("b.json", b'{"item_id": {"0": 7}, "codes": {"0": [1, 2, 3]}}', "column 'item_id': expected .*Struct")
    os.mkfifo(tmp_path / "in" / "pipe.csv")
    refused(tmp_path / "in", tmp_path / "o", r"pipe\.csv: expected a file, got a pipe")
    refused(tmp_path / "in" / "pipe.csv", tmp_path / "o", "expected a file or a folder, got a pipe")


def test_links_are_followed_once(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    data.mkdir()
    elsewhere.mkdir()
    write(elsewhere / "b.csv", 4)
    write(data / "a.csv", 1)
    (data / "more").symlink_to(elsewhere)
    assert ids_of(build(data, tmp_path / "o")) == [1, 2, 3, 4, 5, 6]
    (data / "latest.csv").symlink_to("a.csv")
    refused(data, tmp_path / "x", r"latest\.csv: the same file as .*a\.csv")
    (data / "latest.csv").unlink()
    (data / "gone.csv").symlink_to("nothing.csv")
    refused(data, tmp_path / "x", r"gone\.csv: expected a file, got a link to nothing")
    (data / "gone.csv").unlink()
    (elsewhere / "loop").symlink_to(data)
    refused(data, tmp_path / "x", "loop: a link to .*in, which is read already")


def test_a_folder_named_as_a_file_is_a_folder_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "items.parquet").mkdir()
    refused(tmp_path / "items.parquet", tmp_path / "o", r"items\.parquet: no \.parquet.* file in this folder")
    write(tmp_path / "items.parquet" / "part-0.parquet", 1)
    assert ids_of(build(tmp_path / "items.parquet", tmp_path / "o")) == [1, 2, 3]
    assert ids_of(build(tmp_path / "it*", tmp_path / "o")) == [1, 2, 3]


@pytest.mark.case("W04")
def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("item_id,code_0,code_1,code_1\n1,1,2,3\n")
    refused(tmp_path / "a.csv", tmp_path / "o", "column 'code_1': stands twice", codes=("code_0", "code_1", "code_1"))
    (tmp_path / "b.jsonl").write_text(
        '{"item_id": 1, "codes": [1, 2, 3], "x": {"codes": 1}, "y": "\\"codes\\":"}\n\n'
        '{"item_id": 2, "codes": [1, 2, 3], "codes": [1, 2, 4]}\n'
    )
    refused(tmp_path / "b.jsonl", tmp_path / "o", "column 'codes': row 1: stands twice in this line")
    index = build_index(np.arange(3)[:, None], codebook_sizes=(3,), item_ids=[1, 2, 3])
    (tmp_path / "sets.csv").write_text("item_id,hot,hot\n1,0,1\n2,1,0\n")
    with pytest.raises(CatalogError, match="column 'hot': stands twice in the header"):
        read_set_table(tmp_path / "sets.csv", index)
    (tmp_path / "sets.jsonl").write_text('{"item_id": 1, "hot": true, "hot": false}\n')
    with pytest.raises(CatalogError, match="column 'hot': row 0: stands twice"):
        read_set_table(tmp_path / "sets.jsonl", index)


@pytest.mark.case("W05")
@pytest.mark.parametrize("absent", [True, False])
def test_types_come_from_all_rows(tmp_path: Path, absent: bool) -> None:
    rows: list[dict[str, Any]] = [{"item_id": n, "codes": [n % 8, n % 6, n // 48]} for n in range(300)]
    for n, row in enumerate(rows):
        if n >= 150 or not absent:
            row["tags"] = ["late"] if n >= 150 else None
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    index = build(tmp_path / "a.jsonl", tmp_path / "o", set_names="tags")
    assert index.sets.sizes() == {"late": 150}
    assert read_table(tmp_path / "a.jsonl").frame["tags"].drop_nulls().len() == 150
    rows[299]["item_id"] = 299.5
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    refused(tmp_path / "a.jsonl", tmp_path / "x", "column 'item_id': expected integers or strings, got Float64")


@pytest.mark.case("W06")
def test_a_part_in_which_a_column_is_empty_has_the_type_of_the_others(tmp_path: Path) -> None:
    data = tmp_path / "in"
    data.mkdir()
    base = {"code_0": [1, 2], "code_1": [1, 2], "code_2": [1, 2]}
    nothing = pl.Series([[], None], dtype=pl.List(pl.Null))
    few = pl.Series([["y"], []], dtype=pl.List(pl.Categorical))
    columns = {
        "a": {"item_id": pl.Series([1, 2], dtype=pl.Int16), "tags": [["x"], ["x", "y"]], "hot": [True, False]},
        "b": {"item_id": pl.Series([3, 4], dtype=pl.UInt64), "tags": nothing, "hot": [0, 1]},
        "c": {"item_id": [5, 6], "tags": pl.Series([None, None], dtype=pl.Null), "hot": ["true", "false"]},
        "d": {"item_id": [7, 8], "tags": few, "hot": [True, True]},
    }
    for name, values in columns.items():
        pl.DataFrame(values | base).write_parquet(data / f"{name}.parquet")
    empty = dict.fromkeys([*base, "item_id", "hot", "tags"], pl.Series([], dtype=pl.Null))
    pl.DataFrame(empty).write_parquet(data / "e.parquet")
    index = build(data, tmp_path / "o", set_names="tags", set_columns=("hot",), sizes=[8, 6, 7])
    assert ids_of(index) == list(range(1, 9))
    assert index.sets.sizes() == {"hot": 5, "x": 2, "y": 2}
    for name in ("b", "c", "d"):
        frame = pl.read_parquet(data / f"{name}.parquet").select("item_id", "tags")
        frame.write_parquet(tmp_path / f"sets-{name}.parquet")
    table = read_table(f"{tmp_path}/sets-*.parquet")
    assert table.frame["item_id"].to_list() == [3, 4, 5, 6, 7, 8]
    pl.DataFrame({"item_id": ["z"], "tags": [["x"]]}).write_parquet(tmp_path / "sets-e.parquet")
    with pytest.raises(CatalogError, match=r"sets-e\.parquet: column 'item_id': String, but .*sets-b.* has Int64"):
        read_table(f"{tmp_path}/sets-*.parquet")


@pytest.mark.case("W07")
def test_folders_of_a_partitioned_table_are_columns(tmp_path: Path) -> None:
    data = tmp_path / "in"
    for region, new, first in (
        ("eu", "true", 1),
        ("us%2Fwest", "false", 4),
        ("__HIVE_DEFAULT_PARTITION__", "false", 7),
    ):
        folder = data / f"region={region}" / f"is_new={new}"
        folder.mkdir(parents=True)
        write(folder / "part-0.parquet", first)
    index = build(data, tmp_path / "o", set_names="region", set_columns=("is_new",))
    assert index.sets.sizes() == {"eu": 3, "is_new": 3, "us/west": 3}
    assert index.num_items == 9
    names = [file.name for file in find_files(data)]
    assert names[1:] == ["region=eu/is_new=true/part-0.parquet", "region=us%2Fwest/is_new=false/part-0.parquet"]
    assert build(data / "region=*" / "*" / "*.parquet", tmp_path / "o", set_names="region").sets.sizes()["eu"] == 3
    assert build(data / "region=*", tmp_path / "o", set_names="region").num_items == 9
    one = data / "region=eu"
    refused(
        one,
        tmp_path / "x",
        "column 'region': missing; .*'region=eu' as a column, name a folder above",
        set_names="region",
    )
    assert read_table(data).frame["region"].unique().to_list().count("eu") == 1
    frame = pl.read_parquet(one / "is_new=true" / "part-0.parquet").with_columns(is_new=pl.Series([True, True, False]))
    frame.write_parquet(one / "is_new=true" / "part-0.parquet")
    refused(
        data, tmp_path / "x", "column 'is_new': row 2: False, but the folder .* says 'true'", set_columns=("is_new",)
    )


@pytest.mark.case("W07")
def test_the_bundle_names_every_file_by_its_path_in_the_input(tmp_path: Path, tiny_bundle: Path) -> None:
    from trieton.bundle import Bundle

    spec = tiny_bundle / "retriever"
    sizes = json.loads((spec / "retriever.json").read_text())["token_map"]
    assert sizes
    bundle = Bundle.open(tiny_bundle)
    codes = bundle.index.leaf_codes(np.arange(bundle.index.num_leaves))
    for place, part in enumerate(np.array_split(codes, 2)):
        folder = tmp_path / "in" / f"region={'eu' if place else 'us'}"
        folder.mkdir(parents=True)
        rows = pl.DataFrame({"item_id": range(place * 1000, place * 1000 + len(part)), "codes": part.tolist()})
        rows.write_parquet(folder / "part-0.parquet")
    run = CliRunner().invoke(
        app,
        [
            "build",
            str(tmp_path / "in"),
            "--retriever",
            str(spec),
            "--out",
            str(tmp_path / "b"),
            "--set-names",
            "region",
        ],
    )
    assert run.exit_code == 0, run.output
    files = Bundle.open(tmp_path / "b").manifest["provenance"]["catalogue"]
    assert sorted(files) == ["region=eu/part-0.parquet", "region=us/part-0.parquet"]
    assert len({entry["sha256"] for entry in files.values()}) == 2


@pytest.mark.case("W11")
@pytest.mark.parametrize("form", ["text", "list", "columns"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["abcd"], None),
        (["abcd", "abcd", "abcd"], None),
        (["bacd"], "row 0: level 1: got <a_...> behind <b_...>"),
        (["abcd", "bacd"], "row 1: level 0: expected <a_...>, got '<b_0>'"),
        (["abcd", "abdc"], "row 1: level 2: expected <c_...>, got '<d_2>'"),
        (["acde"], "row 0: level 1: got <c_...> behind <a_...>"),
        (["aacd"], "row 0: level 2: got <c_...> behind <a_...>"),
        (["abca"], "row 0: level 3: got <a_...>, which level 0 has"),
        (["aaaa", "aaaa"], None),
        (["aaaa", "aaab"], "row 1: level 3: expected <a_...>, got '<b_3>'"),
    ],
)
def test_the_letter_of_a_code_says_its_level(tmp_path: Path, form: str, rows: list[str], message: str | None) -> None:
    codes = [[f"<{letter}_{level}>" for level, letter in enumerate(letters)] for letters in rows]
    frame = pl.DataFrame({"item_id": range(len(rows))})
    if form == "columns":
        frame = frame.with_columns(
            pl.Series(f"code_{level}", values) for level, values in enumerate(zip(*codes, strict=True))
        )
    else:
        frame = frame.with_columns(pl.Series("codes", codes if form == "list" else ["".join(row) for row in codes]))
    frame.write_parquet(tmp_path / "a.parquet")
    options: dict[str, Any] = {"sizes": [5] * 4, "code_pattern": r"<\w_(\d+)>"}
    if message is None:
        assert build(tmp_path / "a.parquet", tmp_path / "o", **options).num_items == len(rows)
    else:
        refused(tmp_path / "a.parquet", tmp_path / "o", message, **options)


@pytest.mark.case("W11")
def test_a_level_that_is_left_out_is_noticed_in_any_file(tmp_path: Path) -> None:
    data = tmp_path / "in"
    data.mkdir()
    (data / "0.csv").write_text("item_id,codes\n1,<s9_1> <s10_2> <s11_3>\n2,<s9_1>\n")
    (data / "1.csv").write_text("item_id,codes\n3,<s9_1> <s11_2>\n")
    options: dict[str, Any] = {"code_pattern": r"<s\d+_(\d+)>", "variable_length": True}
    assert build(data / "0.csv", tmp_path / "o", **options).num_items == 2
    refused(data, tmp_path / "x", r"1\.csv: .* row 0: level 1: expected <s10_...>, got '<s11_2>'", **options)
    (data / "1.csv").write_text("item_id,code_0,code_1,code_2\n3,<s9_1><s10_2>,<s10_2>,<s11_2>\n")
    refused(data / "1.csv", tmp_path / "x", "column 'code_0': row 0: expected a code like", **options)
    words = "item_id,codes\n1,<brand_1><type_2><rest_3>\n2,<brand_1><rest_3><type_2>\n"
    (data / "2.csv").write_text(words)
    refused(data / "2.csv", tmp_path / "x", "row 1: level 1: expected <type_...>", code_pattern=r"<\w+_(\d+)>")


@pytest.mark.case("W47")
def test_an_empty_name_is_refused_in_build_and_refresh_alike(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(ROWS)
    for options, said in (
        (["--set", ""], "set: "),
        (["--set-names", " "], "set_names: "),
        (["--item-id", ""], "item_id: "),
        (["--codes", "a,,b"], "codes: "),
        (["--codes", ""], "codes: "),
        (["--set-names", "x", "--set-separator", ""], "set_separator: "),
    ):
        run = CliRunner().invoke(
            app, ["build", str(tmp_path / "a.csv"), "-o", str(tmp_path / "o"), "--codebook-sizes", "8,6,7", *options]
        )
        assert (run.exit_code, run.stderr.startswith(f"trieton: {said}expected")) == (1, True), run.output
    index = build(tmp_path / "a.csv", tmp_path / "o")
    frame = pl.DataFrame({"item_id": [1, 2], "codes": [[1, 2, 3], [1, 2, 4]]})
    for names in ([["a"], ["b", ""]], [["a"], ["b", " "]], [["a"], [None, "b"]], ["a", "b||c"], ["a", "|b"]):
        table = frame.with_columns(pl.Series("tags", names))
        table.write_parquet(tmp_path / "t.parquet")
        refused(
            tmp_path / "t.parquet", tmp_path / "x", "column 'tags': row 1: .*name.* missing or empty", set_names="tags"
        )
        table.drop("codes").write_parquet(tmp_path / "s.parquet")
        with pytest.raises(ValueError, match=r"column 'tags': row 1: .*name.* missing or empty"):
            read_set_table(tmp_path / "s.parquet", index, set_names=["tags"])
    (tmp_path / "s.csv").write_text("item_id,,hot\n1,1,0\n")
    with pytest.raises(ValueError, match=r"column '' \(number 1\): a set needs a name"):
        read_set_table(tmp_path / "s.csv", index)
    with pytest.raises(ValueError, match="sets: expected a name, got ''"):
        build_index([[1]], codebook_sizes=[2], sets={"": [True]})


@pytest.mark.case("W48")
def test_ids_that_an_answer_cannot_hold_are_refused_with_their_row(tmp_path: Path) -> None:
    for ids, what in (
        ([5, -1], "row 1: -1 is no item id"),
        (["a", ""], "row 1: expected an item id of 1 to 255 bytes"),
    ):
        frame = pl.DataFrame({"item_id": ids, "codes": [[1, 2, 3], [1, 2, 4]]})
        for name, writer in (("a.parquet", frame.write_parquet), ("a.jsonl", frame.write_ndjson)):
            writer(tmp_path / name)
            refused(tmp_path / name, tmp_path / "o", what)
    (tmp_path / "a.csv").write_text("item_id,code_0,code_1,code_2\n5,1,2,3\n-1,1,2,4\n")
    refused(tmp_path / "a.csv", tmp_path / "o", "row 1: -1 is no item id")
    with pytest.raises(ValueError, match="item_ids: row 1: -1 is no item id"):
        build_index([[1], [0]], codebook_sizes=[2], item_ids=[5, -1])
    pl.DataFrame({"item_id": [-1], "vector": [[1.0]]}).write_parquet(tmp_path / "v.parquet")
    with pytest.raises(CatalogError, match="row 0: -1 is no item id"):
        read_vectors(tmp_path / "v.parquet", "vector", "item_id")


@pytest.mark.parametrize(
    ("text", "ids", "what"),
    [
        (False, ["1", "007"], "row 1: expected an integer item id .*'007'; strings have to be declared"),
        (False, ["1", "+7"], "row 1: expected an integer item id .*'\\+7'"),
        (False, ["1", "7.0"], "row 1: expected an integer item id .*'7.0'"),
        (False, ["1", str(2**63)], "row 1: expected an integer item id of 64 bits, got '9223372036854775808'"),
        (False, ["1", " 7"], "row 1: expected an integer item id"),
        (True, ["1", " 7"], "row 1: expected an item id without blanks around it, got ' 7'"),
        (True, ["1", "7\t"], "row 1: expected an item id without blanks around it"),
        (False, ["1", "NaN"], "row 1: expected an integer item id"),
        (False, ["1", ""], "row 1: the item id is missing"),
    ],
)
def test_ids_in_text_are_what_is_written_or_refused(tmp_path: Path, text: bool, ids: list[str], what: str) -> None:
    lines = [f"{item},1,2,{n}" for n, item in enumerate(ids)]
    (tmp_path / "a.csv").write_text("\n".join(["item_id,code_0,code_1,code_2", *lines]))
    refused(tmp_path / "a.csv", tmp_path / "o", what, text_ids=text)
    if ids[1]:
        (tmp_path / "a.json").write_text(json.dumps({item: [1, 2, n] for n, item in enumerate(ids)}))
        refused(tmp_path / "a.json", tmp_path / "o", what, text_ids=text)
        index = build_index([[0], [1]], codebook_sizes=[2], item_ids=["1", "2"] if text else [1, 2])
        (tmp_path / "s.csv").write_text("\n".join(["item_id,hot", *(f"{item},1" for item in ids)]))
        with pytest.raises(ValueError, match=what):
            read_set_table(tmp_path / "s.csv", index)


def test_an_id_in_two_parts_and_blanks_in_typed_ids(tmp_path: Path) -> None:
    data = tmp_path / "in"
    data.mkdir()
    write(data / "a.parquet", 1)
    write(data / "b.parquet", 3)
    with pytest.raises(
        ValueError, match=r"item 3 has two semantic IDs: .*b\.parquet row 0 \[1, 2, 0\], .*a\.parquet row 2"
    ):
        build(data, tmp_path / "o")
    pl.DataFrame({"item_id": [" a", "a"], "codes": [[1, 2, 3]] * 2}).write_parquet(tmp_path / "t.parquet")
    assert ids_of(build(tmp_path / "t.parquet", tmp_path / "o")) == [" a", "a"]
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + ROWS.encode())
    (tmp_path / "bom.json").write_bytes(b'\xef\xbb\xbf{"1": [1, 2, 3], "2": [1, 2, 4]}')
    for name in ("bom.csv", "bom.json"):
        assert ids_of(build(tmp_path / name, tmp_path / "o")) == [1, 2]


def test_vectors_are_read_as_tables_are(tmp_path: Path) -> None:
    data = tmp_path / "exp[1]"
    (data / "_temporary").mkdir(parents=True)
    pl.DataFrame({"item_id": [1, 2], "vector": [[1.0, 2.0], [3.0, 4.0]]}).write_parquet(data / "a.parquet")
    (data / "b.jsonl").write_text('{"item_id": 3, "vector": [5, 6.5]}\n')
    (data / "_temporary" / "c.jsonl").write_text('{"item_id": 4, "vector": [5, 6.5]}\n')
    ids, vectors = read_vectors(data, "vector", "item_id")
    assert (ids.to_list(), vectors.tolist()) == ([1, 2, 3], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.5]])
    (data / "b.jsonl").write_text('{"item_id": 3, "vector": [5, 6.5]}\n{"item_id": 4, "vector": [5.5]}\n')
    with pytest.raises(CatalogError, match=r"b\.jsonl: column 'vector': row 1: expected 2 numbers"):
        read_vectors(data, "vector", "item_id")
    np.save(data / "v.npy", np.ones((2, 2), np.float32))
    (data / "v.npy").rename(data / "V.NPY")
    assert read_vectors(data / "V.NPY", "vector", "item_id")[1].shape == (2, 2)
