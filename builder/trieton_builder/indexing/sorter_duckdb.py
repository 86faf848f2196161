"""Sorting out of core with DuckDB: memory is bounded, the rest goes to disk."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import duckdb

from trieton_builder.indexing.interruptible import interruptible

SHARE = 0.7  # of the memory budget; the rest is for the interpreter and the chunks in flight


class DuckDbEngine:
    """Implements `SortEngine` in this process."""

    def __init__(self, memory: int, folder: Path, progress: Callable[[str, int, int], None] | None = None):
        """`memory`: budget of the whole process in bytes. `folder`: where runs that do not fit are spilled."""
        self._settings = {
            "memory_limit": f"{max(64, int(memory * SHARE) >> 20)}MiB",
            "temp_directory": str(folder / "spill"),
            "enable_external_access": "true",
        }
        self._progress = progress

    def sort_rows(self, rows: Path, out: Path, columns: list[str], by: list[str], without: Path | None) -> None:
        source = _table(*sorted(rows.glob("*.parquet")))
        if without is not None:
            source += f" WHERE row NOT IN (SELECT row FROM {_table(without)})"
        self._copy(f"SELECT {', '.join(columns)} FROM {source} ORDER BY {', '.join(by)}", out, "sort")

    def sort_ids(self, parts: list[tuple[Path, int]], out: Path) -> None:
        name = _id_column(parts[0][0]) if parts else "row"
        pieces = [
            f"SELECT {name} AS id, file_row_number + {first} AS place "
            f"FROM {_table(part, options='file_row_number = true')}"
            for part, first in parts
        ]
        self._copy(f"SELECT * FROM ({' UNION ALL '.join(pieces)}) ORDER BY id, place", out, "sort ids")

    def _copy(self, query: str, out: Path, stage: str) -> None:
        out.mkdir()
        target = _quoted(out / "part-0.parquet")
        # Uncompressed: it is read once, soon, and the disk is not the bottleneck.
        statement = f"COPY ({query}) TO {target} (FORMAT parquet, COMPRESSION uncompressed, ROW_GROUP_SIZE 262144)"
        connection = duckdb.connect(config=self._settings)
        connection.execute("SET enable_progress_bar_print = false")  # in a notebook it would print one of its own
        _run(connection, statement, stage, self._progress)


def _run(
    connection: duckdb.DuckDBPyConnection,
    statement: str,
    stage: str,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    """Run a statement, show its progress, and close the connection."""
    ended = threading.Event()

    def work() -> None:
        try:
            connection.execute(statement)
        finally:
            ended.set()

    def tick() -> None:
        if progress:
            progress(stage, max(0, int(connection.query_progress())), 100)

    try:
        interruptible(work, cancel=connection.interrupt, tick=tick)
    except duckdb.Error as error:
        said = str(error).splitlines()[0]
        if "failed to offload" in said:
            said += " (no room on the disk for what memory does not hold; --work-dir names another)"
        raise OSError(f"sorting with DuckDB failed: {said}") from None
    finally:
        if ended.is_set():  # else closing would wait for a statement that no interrupt reaches
            connection.close()
    if progress:
        progress(stage, 100, 100)


def _id_column(part: Path) -> str:
    names = [row[0] for row in duckdb.execute(f"DESCRIBE FROM {_table(part)}").fetchall()]
    return "id" if "id" in names else "row"


def _table(*files: Path, options: str = "") -> str:
    """Parquet files as a table. A folder named `year=2024` above them is no column."""
    # One by one: in a pattern of its own for all of them a backslash in a folder's name would separate folders.
    names = f"[{', '.join(_quoted(_pattern(file)) for file in files)}]"
    return f"read_parquet({', '.join(filter(None, (names, 'hive_partitioning = false', options)))})"


def _pattern(path: Path) -> str:
    """A literal path where DuckDB takes patterns."""
    return re.sub(r"[\[*?]", r"[\g<0>]", str(path))


def _quoted(text: Path | str) -> str:
    return "'" + str(text).replace("'", "''") + "'"
