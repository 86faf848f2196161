"""The three sorting engines give byte-identical index files, equal to the index built in memory."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from test_index import catalogues
from trieton.index.static_index import StaticIndex
from trieton_builder.catalogue.columns import Columns
from trieton_builder.catalogue.keys import KeyLayout
from trieton_builder.catalogue.read import CatalogSource
from trieton_builder.indexing.build_file import build_file
from trieton_builder.indexing.sorter_duckdb import DuckDbEngine
from trieton_builder.indexing.trie import build_index


def write_catalogue(folder: Path, case: dict, files: int = 2) -> CatalogSource:
    """The arguments of `build_index` as Parquet files with one list column."""
    folder.mkdir(exist_ok=True)
    codes, sizes, count = case["codes"], case["codebook_sizes"], len(case["codes"])
    lengths = [len(sizes)] * count if case.get("lengths") is None else case["lengths"].tolist()
    rows = [row[:length] for row, length in zip(codes.astype(np.int64).tolist(), lengths, strict=True)]
    frame = pl.DataFrame({"codes": rows}, {"codes": pl.List(pl.Int64)})
    if case.get("item_ids") is not None:
        frame = frame.with_columns(pl.Series("item_id", case["item_ids"].tolist()))
    frame = frame.with_columns(pl.Series(name, mask) for name, mask in case.get("sets", {}).items())
    for number in range(files):
        part = frame[number * count // files : (number + 1) * count // files]
        part.write_parquet(folder / f"part-{number}.parquet")
    columns = Columns(
        item_id="item_id" if case.get("item_ids") is not None else None,
        set_columns=tuple(case.get("sets", {})),
        variable_length=True,
    )
    return CatalogSource(str(folder), KeyLayout.of(sizes), columns)


def large_case(count: int = 20_000, **extra: Any) -> dict:
    rng = np.random.default_rng(0)
    case = {
        "codes": rng.integers(0, 16, (count, 5)),
        "codebook_sizes": [16] * 5,
        "lengths": rng.integers(2, 6, count),
        "item_ids": np.array([f"item {n}" for n in rng.permutation(count)], object),
        "sets": {"fresh": rng.random(count) < 0.5, "rare": rng.random(count) < 0.001},
    }
    return case | extra


@settings(deadline=None, max_examples=25)
@given(catalogues())
def test_duckdb_and_polars_give_the_bytes_of_the_build_in_memory(
    tmp_path_factory: pytest.TempPathFactory, case: dict
) -> None:
    if not len(case["codes"]):
        return
    folder = tmp_path_factory.mktemp("engines")
    source = write_catalogue(folder / "in", case)
    build_index(**case).save(folder / "wanted")
    for engine in ("polars", "duckdb"):
        build_file(source, folder / engine, engine=engine)
        assert (folder / engine).read_bytes() == (folder / "wanted").read_bytes()


def test_chunks_of_any_size_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = large_case()
    source = write_catalogue(tmp_path / "in", case, files=3)
    build_index(**case).save(tmp_path / "wanted")
    monkeypatch.setattr("trieton_builder.indexing.survey.chunk_rows", lambda layout: 1013)
    monkeypatch.setattr("trieton_builder.indexing.emit.chunk_rows", lambda layout: 1013)
    monkeypatch.setattr("trieton_builder.catalogue.tables.BATCH_ROWS", 777)
    monkeypatch.setattr("trieton_builder.indexing.build_file._ROWS_PER_FILE", 2500)
    for engine in ("polars", "duckdb"):
        report = build_file(source, tmp_path / engine, engine=engine)
        assert (report.num_items, report.dropped, report.engine) == (20_000, 0, engine)
        assert (tmp_path / engine).read_bytes() == (tmp_path / "wanted").read_bytes()


@pytest.fixture(scope="module")
def spark() -> Any:
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("no Java on this machine")
    pytest.importorskip("pyspark")
    from trieton_builder.indexing.sorter_spark import SparkEngine

    local = {
        "spark.sql.shuffle.partitions": "3",
        "spark.driver.memory": "512m",
        # A few hundred rows: the compilers of Spark and Java would cost more than they save.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    }
    engine = SparkEngine.connect(local)
    yield engine
    engine._session.stop()


def test_spark_gives_the_same_bytes(spark: Any, tmp_path: Path) -> None:
    """With row numbers as ids, and with ids of text and repeats that are dropped."""
    plain = {"codes": np.random.default_rng(0).integers(0, 4, (300, 3)), "codebook_sizes": [4] * 3}
    repeated = large_case(1000, sets={"fresh": np.arange(1000) % 6 < 2})
    for column in ("codes", "lengths", "item_ids"):
        repeated[column][1::2] = repeated[column][::2]
    for dropped, case in ((0, plain), (500, repeated)):
        source = write_catalogue(tmp_path / f"in-{dropped}", case, files=3)
        wanted = build_file(source, tmp_path / "wanted", engine="duckdb", drop_repeats=True)
        report = build_file(source, tmp_path / "spark", engine=spark, drop_repeats=True)
        assert report.dropped == wanted.dropped == dropped
        assert (tmp_path / "spark").read_bytes() == (tmp_path / "wanted").read_bytes()


@pytest.mark.case("W01")
@pytest.mark.parametrize("name", ["exp[1]", "a*b?{x,y}", "my data%20"])
def test_spark_works_in_a_folder_of_any_name(spark: Any, tmp_path: Path, name: str) -> None:
    case = {"codes": np.random.default_rng(0).integers(0, 4, (30, 3)), "codebook_sizes": [4] * 3}
    (tmp_path / name).mkdir()
    source = write_catalogue(tmp_path / name / "in", case)
    build_file(source, tmp_path / "wanted", engine="polars")
    build_file(source, tmp_path / name / "out", engine=spark)
    assert (tmp_path / name / "out").read_bytes() == (tmp_path / "wanted").read_bytes()


@pytest.mark.case("I08")
@pytest.mark.parametrize("engine", ["polars", "duckdb"])
def test_repeats_name_file_and_row_or_are_dropped(tmp_path: Path, engine: str) -> None:
    case = {"codes": np.array([[1, 2], [0, 0], [1, 2], [3, 3]]), "codebook_sizes": [8, 8]}
    case["item_ids"] = np.array([7, 8, 7, 9])
    source = write_catalogue(tmp_path / "in", case)
    with pytest.raises(ValueError, match=r"item 7 with .*part-0\.parquet row 0 and .*part-1\.parquet row 0; drop"):
        build_file(source, tmp_path / "out", engine=engine)
    assert os.listdir(tmp_path) == ["in"]
    report = build_file(source, tmp_path / "out", engine=engine, drop_repeats=True)
    assert (report.num_items, report.dropped) == (3, 1)
    kept = [0, 1, 3]
    build_index(case["codes"][kept], codebook_sizes=[8, 8], item_ids=case["item_ids"][kept]).save(tmp_path / "wanted")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "wanted").read_bytes()


@pytest.mark.case("I09")
@pytest.mark.parametrize("engine", ["polars", "duckdb"])
def test_one_item_with_two_semantic_ids_names_both_files_and_rows(tmp_path: Path, engine: str) -> None:
    case = {"codes": np.array([[1, 2], [0, 0], [1, 3], [3, 3]]), "codebook_sizes": [8, 8]}
    case["item_ids"] = np.array(["x", "y", "x", "z"], object)
    source = write_catalogue(tmp_path / "in", case)
    text = r"item 'x' has two semantic IDs: .*part-0\.parquet row 0 \[1, 2\], .*part-1\.parquet row 0 \[1, 3\]"
    with pytest.raises(ValueError, match=text):
        build_file(source, tmp_path / "out", engine=engine, drop_repeats=True)
    assert os.listdir(tmp_path) == ["in"]


def test_auto_takes_the_engine_that_fits_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_catalogue(tmp_path / "in", large_case(100))
    assert build_file(source, tmp_path / "out").engine == "polars"
    monkeypatch.setattr(CatalogSource, "estimated_rows", lambda self: 10**9)
    assert build_file(source, tmp_path / "out").engine == "duckdb"


def test_progress_reaches_its_end_in_every_stage(tmp_path: Path) -> None:
    source = write_catalogue(tmp_path / "in", large_case(2000))
    seen: dict[str, tuple[int, int]] = {}
    build_file(
        source, tmp_path / "out", engine="duckdb", progress=lambda stage, done, of: seen.__setitem__(stage, (done, of))
    )
    assert list(seen) == ["read", "sort", "count", "sort ids", "order", "write"]
    assert all(done == of for done, of in seen.values())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"engine": "pandas"}, ValueError, "engine: expected one of auto, polars, duckdb, spark"),
        ({"memory": 1 << 20}, ValueError, "memory: expected at least 512 MB, got 1 MB"),
        ({"out": "missing/out"}, FileNotFoundError, "no such folder"),
        ({"out": "in"}, IsADirectoryError, "expected the name of a file"),
    ],
)
def test_bad_arguments_write_nothing(tmp_path: Path, arguments: dict, error: type, message: str) -> None:
    source = write_catalogue(tmp_path / "in", large_case(100))
    out = tmp_path / arguments.pop("out", "out")
    with pytest.raises(error, match=message):
        build_file(source, out, **arguments)
    assert os.listdir(tmp_path) == ["in"]


def test_a_failing_engine_is_one_clear_error(tmp_path: Path) -> None:
    engine = DuckDbEngine(512 << 20, tmp_path)
    (tmp_path / "rows").mkdir()
    with pytest.raises(OSError, match="sorting with DuckDB failed: "):
        engine.sort_rows(tmp_path / "rows", tmp_path / "out", ["key0"], ["key0"], None)


def test_an_interrupt_ends_a_sort_and_nothing_else_is_heard_of_it(tmp_path: Path) -> None:
    engine = DuckDbEngine(512 << 20, tmp_path)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        engine._copy("SELECT sum(range) AS total FROM range(1000000000000000)", tmp_path / "out", "sort")


SLOW_BUILD = """
import sys, time
from trieton_builder.indexing.build_file import build_file
from trieton_builder.catalogue.read import CatalogSource
from trieton_builder.catalogue.columns import Columns
from trieton_builder.catalogue.keys import KeyLayout

def stall(stage, done, total):
    if stage == "write":
        print("writing", flush=True)
        time.sleep(60)

source = CatalogSource(sys.argv[1], KeyLayout.of([16] * 5), Columns(variable_length=True))
build_file(source, sys.argv[2], engine="duckdb", progress=stall)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_leaves_nothing_that_looks_finished(tmp_path: Path, how: signal.Signals) -> None:
    source = write_catalogue(tmp_path / "in", large_case(5000))
    out = tmp_path / "out"
    command = [sys.executable, "-c", SLOW_BUILD, str(tmp_path / "in"), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(how)
        process.wait(timeout=30)
    visible = [name for name in os.listdir(tmp_path) if not name.startswith(".")]
    assert visible == ["in"]
    if how == signal.SIGINT:
        assert os.listdir(tmp_path) == ["in"]
    build_file(source, out, engine="duckdb")  # the next build clears what a killed one left
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    StaticIndex.load(out)
