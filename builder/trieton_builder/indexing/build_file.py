"""From a catalogue on disk to an index file, within a memory budget, with any of the three sorting engines."""

import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import psutil
from trieton.index.static_index import KIND, file_metadata
from trieton.index.tensorfile import TensorFileWriter

from trieton_builder.catalogue.read import CatalogSource, InputBatch
from trieton_builder.files.whole_file import named
from trieton_builder.indexing.sorted_files import SortedFiles, SortEngine, row_sets
from trieton_builder.indexing.sorted_rows import MemoryRows, SortedRows
from trieton_builder.indexing.survey import Progress, Survey
from trieton_builder.indexing.trie import write_index

ENGINES = ("auto", "polars", "duckdb", "spark")
_ROWS_PER_FILE = 1 << 22
_SHARE_PER_FILE = 0.06  # of the memory that may be used; a file is held about twice while it is written
_MIN_MEMORY = 512_000_000


@dataclass(frozen=True)
class BuildReport:
    """What a build did.

    Attributes:
        path: the index file.
        digest: its checksum.
        engine: which engine sorted.
        num_items: items in the index.
        dropped: rows that repeated an item and were left out.
    """

    path: Path
    digest: str
    engine: str
    num_items: int
    dropped: int


def build_file(
    source: CatalogSource,
    out: str | Path,
    *,
    engine: str | SortEngine = "auto",
    memory: int = 4 << 30,
    drop_repeats: bool = False,
    work_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Build the index of `source` into the file `out`. The file appears whole or not at all; an older one is replaced.

    The same input gives the same bytes, whatever the engine.

    Args:
        engine: "polars" sorts in memory, "duckdb" out of core, "spark" on a cluster; "auto" takes polars when the rows
            fit into the budget, else duckdb. Or an engine that was set up elsewhere.
        memory: bytes that this process may use; with "polars" and "spark" only the parts that are not theirs obey it.
        drop_repeats: leave out rows that repeat both item id and semantic ID, instead of refusing them.
        work_dir: where sorted runs go, about three times the size of the rows; beside `out` by default. For a cluster,
            storage that all its machines see.
        progress: called as `progress(stage, done, total)`.

    Raises:
        CatalogError: the input; names file, column and row.
        ValueError: an item with two semantic IDs, or another argument.
        OSError: no space, no Java, nothing to write to.
    """
    out = Path(out)
    if isinstance(engine, str) and engine not in ENGINES:
        raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    if memory < _MIN_MEMORY:
        raise ValueError(f"memory: expected at least {_MIN_MEMORY // 10**6} MB, got {memory // 10**6} MB")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent}: no such folder to write {out.name} to")
    if out.exists() and not out.is_file():
        raise IsADirectoryError(f"{out}: is a folder or a device; expected the name of a file")
    if engine == "auto":
        engine = "polars" if _fits(source, memory) else "duckdb"
    with ExitStack() as folders:
        beside = folders.enter_context(work_folder(out.parent, out.name))
        folder = folders.enter_context(work_folder(Path(work_dir), out.name)) if work_dir else beside
        rows: SortedRows
        if engine == "polars":
            rows = _in_memory(source, progress)
        else:
            sorts = _sort_engine(engine, memory, folder, progress) if isinstance(engine, str) else engine
            rows = _on_disk(source, folder, sorts, memory, progress)

        def open_file(survey: Survey) -> TensorFileWriter:
            return TensorFileWriter(beside / "index", survey.tensor_specs(), file_metadata(survey.spec()), kind=KIND)

        with named(out):
            digest, dropped = write_index(
                rows,
                open_file,
                TensorFileWriter.finish,
                drop_repeats=drop_repeats,
                progress=progress,
                describe=source.describe,
            )
            os.replace(beside / "index", out)
    name = engine if isinstance(engine, str) else type(engine).__name__
    return BuildReport(out, digest, name, rows.num_rows, dropped)


def _fits(source: CatalogSource, memory: int) -> bool:
    """Whether the rows can be sorted in memory: keys twice, row numbers, ids and sets, and room to spare."""
    ids = 48 if source.text_ids else 24
    per_row = 24 * source.layout.num_keys + 16 + ids + 2 * len(source.columns.set_columns)
    return source.estimated_rows() * per_row + 24 * source.num_memberships < memory * 0.6


def _sort_engine(engine: str, memory: int, folder: Path, progress: Progress | None) -> SortEngine:
    if engine == "spark":
        from trieton_builder.indexing.sorter_spark import SparkEngine

        return SparkEngine.connect()
    from trieton_builder.indexing.sorter_duckdb import DuckDbEngine

    return DuckDbEngine(memory, folder, progress)


def _in_memory(source: CatalogSource, progress: Progress | None) -> MemoryRows:
    frames, has_end, id_bytes = [], False, 0
    for batch in _read(source, progress):
        frames.append(batch.frame)
        has_end |= batch.has_short
        id_bytes = max(id_bytes, batch.id_bytes)
    frame = pl.concat(frames, rechunk=True)
    frames.clear()
    ids = None
    if "id" in frame.columns:
        column = frame["id"]
        ids = column.to_numpy()
        if source.text_ids:
            ids = np.array([text.encode() for text in column.to_list()], f"S{id_bytes}")
    sets = row_sets(frame, source.set_names)
    keys = [frame[f"key{k}"].to_numpy() for k in range(source.layout.num_keys)]
    return MemoryRows(source.layout, has_end, keys, ids, sets)


def _on_disk(
    source: CatalogSource, folder: Path, engine: SortEngine, memory: int, progress: Progress | None
) -> SortedFiles:
    rows = folder / "rows"
    rows.mkdir()
    has_end, id_bytes = False, 0
    waiting: list[pl.DataFrame] = []

    def write() -> None:
        number = sum(1 for _ in rows.iterdir())
        with named(folder.parent):
            pl.concat(waiting).write_parquet(rows / f"{number:06}.parquet", compression="lz4", statistics=False)
        waiting.clear()

    for batch in _read(source, progress):
        has_end |= batch.has_short
        id_bytes = max(id_bytes, batch.id_bytes)
        waiting.append(batch.frame)
        many = sum(map(len, waiting)) >= _ROWS_PER_FILE // source.layout.num_keys
        if many or sum(frame.estimated_size() for frame in waiting) >= memory * _SHARE_PER_FILE:
            write()
    if waiting:
        write()
    id_type = np.dtype(f"S{id_bytes}" if source.text_ids else np.int64)
    has_ids = source.columns.item_id is not None
    names, columns = source.set_names, set(source.columns.set_columns)
    return SortedFiles(
        source.layout,
        has_end,
        id_type,
        names,
        tuple(number for number, name in enumerate(names) if name in columns),
        source.columns.set_names is not None,
        has_ids,
        engine,
        folder,
    ).sort(rows)


def _read(source: CatalogSource, progress: Progress | None) -> Iterator[InputBatch]:
    total = source.estimated_rows() if progress else 0
    done = 0
    for batch in source.batches():
        yield batch
        done += len(batch.frame)
        if progress:
            progress("read", done, max(total, done))


@contextmanager
def work_folder(parent: Path, name: str) -> Iterator[Path]:
    """A hidden folder that goes away however the build ends; what a killed build left there goes first."""
    prefix = f".{name}.building-{socket.gethostname()}-"  # the host, because other machines may share the storage
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        number = left.name.removeprefix(prefix).split("-")[0]
        if not psutil.pid_exists(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
    if folder.parts[0] == "~":  # a folder of that name; Polars would take it for the home folder
        folder = folder.absolute()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
