"""Sorting out of core with DuckDB: memory is bounded, the rest goes to disk."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import duckdb

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
        files = ", ".join(_quoted(file) for file in sorted(rows.glob("*.parquet")))
        source = f"read_parquet([{files}], hive_partitioning = false)"
        if without is not None:
            source += f" WHERE row NOT IN (SELECT row FROM read_parquet({_quoted(without)}, hive_partitioning = false))"
        self._copy(f"SELECT {', '.join(columns)} FROM {source} ORDER BY {', '.join(by)}", out, "sort")

    def sort_ids(self, parts: list[tuple[Path, int]], out: Path) -> None:
        name = _id_column(parts[0][0]) if parts else "row"
        pieces = [
            f"SELECT {name} AS id, file_row_number + {first} AS place FROM "
            f"read_parquet({_quoted(part)}, file_row_number = true, hive_partitioning = false)"
            for part, first in parts
        ]
        self._copy(f"SELECT * FROM ({' UNION ALL '.join(pieces)}) ORDER BY id, place", out, "sort ids")

    def _copy(self, query: str, out: Path, stage: str) -> None:
        out.mkdir()
        target = _quoted(out / "part-0.parquet")
        # Uncompressed: it is read once, soon, and the disk is not the bottleneck.
        statement = f"COPY ({query}) TO {target} (FORMAT parquet, COMPRESSION uncompressed, ROW_GROUP_SIZE 262144)"
        with duckdb.connect(config=self._settings) as connection:
            _run(connection, statement, stage, self._progress)


def _run(
    connection: duckdb.DuckDBPyConnection,
    statement: str,
    stage: str,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    """Run a statement in a thread, so that progress can be shown and an interrupt reaches it."""
    failure: list[Exception] = []
    # Not Thread.join: interrupted, it takes a thread that works on for ended (before Python 3.13).
    ended = threading.Event()

    def work() -> None:
        try:
            connection.execute(statement)
        except duckdb.Error as error:
            failure.append(error)
        finally:
            ended.set()

    threading.Thread(target=work, daemon=True).start()
    try:
        while not ended.wait(0.2):
            if progress:
                progress(stage, max(0, int(connection.query_progress())), 100)
    except BaseException:
        while not ended.is_set():  # a connection at work cannot be closed, however impatient the second Ctrl-C
            with contextlib.suppress(KeyboardInterrupt):
                connection.interrupt()
                ended.wait(0.1)
        raise
    if failure:
        said = str(failure[0]).splitlines()[0]
        if "failed to offload" in said:
            said += " (no room on the disk for what memory does not hold; --work-dir names another)"
        raise OSError(f"sorting with DuckDB failed: {said}")
    if progress:
        progress(stage, 100, 100)


def _id_column(part: Path) -> str:
    names = [
        row[0]
        for row in duckdb.execute(f"DESCRIBE FROM read_parquet({_quoted(part)}, hive_partitioning = false)").fetchall()
    ]
    return "id" if "id" in names else "row"


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"
