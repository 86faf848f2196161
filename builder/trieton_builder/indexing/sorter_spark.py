"""Sorting on a Spark cluster, for catalogues that outgrow one machine. In tests: local mode on the machine's Java.

Only the sorts run there. The driver reads and checks the input batch by batch and streams the sorted parts into the
index, which is one file: its memory stays bounded, its disks and one of its cores see every row.
"""

import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trieton_builder.indexing.interruptible import interruptible

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


class SparkEngine:
    """Implements `SortEngine` as Spark jobs.

    The work folder has to be on storage that the driver and all executors see under the same path. Spark's range
    partitioner cuts the order into parts, each sorted; their names are in order.
    """

    def __init__(self, session: "SparkSession"):
        self._session = session

    @classmethod
    def connect(cls, settings: Mapping[str, str] | None = None) -> "SparkEngine":
        """Use the session that is active, or start one with `settings` on top of Spark's own configuration.

        Without a master anywhere Spark runs in this machine's local mode, bound to the loopback interface.

        Raises:
            OSError: no Java, or no PySpark.
        """
        try:
            from pyspark.sql import SparkSession

            builder = SparkSession.builder.appName("trieton build")
            if "spark.master" not in (settings or {}) and not _submitted():
                builder = builder.master("local[*]")
                for key, value in _LOCAL.items():
                    builder = builder.config(key, value)
            for key, value in (settings or {}).items():
                builder = builder.config(key, value)
            session = builder.getOrCreate()
        except ImportError:
            raise OSError(
                "engine spark: PySpark is not installed; it comes with pip install '.[spark]' in the checkout"
            ) from None
        except Exception as error:  # whatever the gateway to the Java process raises
            raise OSError(f"engine spark: no session: {str(error).splitlines()[0]}") from None
        return cls(session)

    def sort_rows(self, rows: Path, out: Path, columns: list[str], by: list[str], without: Path | None) -> None:
        def work() -> None:
            frame = self._read(rows).select(*columns)
            if without is not None:
                frame = frame.join(self._read(without), on="row", how="left_anti").select(*columns)
            self._write(frame.sort(*by), out)

        self._run(work)

    def sort_ids(self, parts: list[tuple[Path, int]], out: Path) -> None:
        if not parts:
            out.mkdir()
            return
        self._run(lambda: self._sort_ids(parts, out))

    def _sort_ids(self, parts: list[tuple[Path, int]], out: Path) -> None:
        from pyspark.sql import functions as F

        # By folder: a file whose path has brackets is read twice. The join keeps those that were asked for.
        files = self._read(*{part.parent for part, _ in parts})
        column = "id" if "id" in files.columns else "row"
        # The place of a row is the first place of its file plus its number there: a join with a table of a few rows.
        firsts = self._session.createDataFrame([(part.name, first) for part, first in parts], "file string, first long")
        rows = files.select(
            F.col(column).alias("id"),
            F.col("_metadata.file_name").alias("file"),
            F.col("_metadata.row_index").alias("index"),
        )
        placed = rows.join(F.broadcast(firsts), on="file").select(
            "id", (F.col("first") + F.col("index")).alias("place")
        )
        self._write(placed.sort("id", "place"), out)

    def _run(self, work: Callable[[], None]) -> None:
        """Run jobs in a group of their own, which an interrupt cancels; a fault of Spark's becomes one line."""
        context = self._session.sparkContext
        group = f"trieton-{uuid.uuid4()}"

        def grouped() -> None:
            context.setJobGroup(group, "trieton build", interruptOnCancel=True)
            work()

        try:
            interruptible(grouped, cancel=lambda: context.cancelJobGroup(group))
        except Exception as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise OSError(f"sorting with Spark failed: {said[0]}") from None

    def _read(self, *paths: Path) -> "DataFrame":
        # Without the option Spark takes brackets and stars in a path for a pattern.
        return self._session.read.option("__globPaths__", "false").parquet(*map(_uri, paths))

    def _write(self, frame: "DataFrame", out: Path) -> None:
        frame.write.option("compression", "uncompressed").parquet(_uri(out))


def _uri(path: Path) -> str:
    """A path as Hadoop reads it: with its scheme, and without the percent signs of a real URI."""
    return f"file://{path.absolute()}"


def _submitted() -> bool:
    """Whether `spark-submit` or the environment says where Spark runs."""
    return any(name in os.environ for name in ("MASTER", "SPARK_REMOTE", "SPARK_CONF_DIR", "PYSPARK_GATEWAY_PORT"))
