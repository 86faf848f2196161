"""Tables in files: Parquet, CSV, JSON lines, or JSON of item -> codes, also compressed; read in batches or whole.

Every command that reads a table reads it here, so a file means the same to all of them.
"""

import glob
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from trieton_builder.catalogue.columns import holds_nothing, read_ids, what_there_is
from trieton_builder.catalogue.faults import CatalogError, fault
from trieton_builder.catalogue.files import FoundFile, find_files, kind_of

BATCH_ROWS = 1 << 18
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_SHORT_LINE = 1 << 16  # one record of JSON lines is not longer, an object with all items may be
_RECORD_KEYS = {"item_id", "codes", "code_0"}  # keys of a record, where one line of JSON may be that or item -> codes
T = TypeVar("T")


@dataclass(frozen=True)
class TableFile:
    """One file of a table. Columns of the folders it lies in (`region=eu/`) are columns of the file, of text.

    Attributes:
        found: where it lies.
    """

    found: FoundFile

    @property
    def path(self) -> Path:
        return self.found.path

    @cached_property
    def kind(self) -> str:
        """parquet, csv, lines or json. What is named .json may be lines; that is seen in its first one."""
        kind = kind_of(self.path)
        return "lines" if kind == "json" and self._has_records() else kind

    @cached_property
    def is_compressed(self) -> bool:
        """Whether all of it is compressed from outside, whatever its name says."""
        return any(self._begin.startswith(magic) for magic in _MAGIC)

    @cached_property
    def schema(self) -> pl.Schema:
        """Columns and types. CSV has text only, and JSON of item -> codes has `item_id` and `codes`.

        The types of JSON lines come from all of them: a column may begin with nulls, or be absent at first.
        """
        if self.kind == "json":  # its codes may also be text; that is seen when they are read
            schema = pl.Schema({"item_id": pl.String, "codes": pl.List(pl.Int64)})
        else:
            schema = self._own_schema
        return pl.Schema(dict.fromkeys(self.partitions, pl.String) | dict(schema))

    @property
    def partitions(self) -> dict[str, str | None]:
        """Columns from the names of its folders, and their value."""
        return dict(self.found.partitions)

    def is_typed(self, column: str) -> bool:
        """Whether the type of a column says what its values are; else all is text, whatever was meant."""
        return self.kind in ("parquet", "lines") and (column not in self.partitions or column in self._own_schema)

    def frames(self, columns: Collection[str]) -> Iterator[pl.DataFrame]:
        """The rows in order, `BATCH_ROWS` at a time, with these columns only.

        Raises:
            CatalogError: what cannot be read, a key twice in a JSON line, a value that is not that of the folder.
        """
        row = 0
        for batch in self._batches([name for name in columns if name in self._stored]):
            for name, value in self.partitions.items():
                if name in batch.columns:
                    _compare(batch[name], value, self.path, row)
            given = [
                pl.lit(self.partitions[name], pl.String).alias(name) for name in columns if name not in self._stored
            ]
            whole = batch.with_columns(given).select(columns)
            for start in range(0, len(whole), BATCH_ROWS):
                yield whole[start : start + BATCH_ROWS]
            row += len(batch)

    def head(self, rows: int) -> pl.DataFrame:
        """The first rows, all columns."""
        if self.kind == "json":
            return self._item_codes.head(rows)
        first = self._guarded(lambda: self._scan().head(rows).collect())
        return first.with_columns(
            pl.lit(value, pl.String).alias(name) for name, value in self.partitions.items() if name not in first.columns
        )

    def num_rows(self) -> int | None:
        """Rows, where the format says it without reading everything."""
        if self.kind != "parquet":
            return None
        return int(self._guarded(lambda: self._scan().select(pl.len()).collect().item()))

    @cached_property
    def _begin(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(4)

    @property
    def _stored(self) -> Collection[str]:
        return ("item_id", "codes") if self.kind == "json" else self._own_schema

    @cached_property
    def _own_schema(self) -> pl.Schema:
        schema = self._guarded(lambda: self._scan().collect_schema())
        for name in schema if self.kind == "csv" else ():
            # Polars renames the second of two columns with one name, and goes on.
            original = re.fullmatch(r"(.*)_duplicated_\d+", name, re.DOTALL)
            if original and original[1] in schema:
                raise CatalogError(f"{self.path}: column {original[1]!r}: stands twice in the header; rename one")
        return schema

    def _batches(self, columns: list[str]) -> Iterator[pl.DataFrame]:
        if self.kind == "json":
            yield self._item_codes.select(columns)
            return
        if self.kind == "lines":
            self._refuse_repeated_keys(columns)
        # Without a column there would be no rows; the folder's name alone does not say how many there are.
        scan = self._scan().select(columns or [next(iter(self._own_schema))])
        batches = self._guarded(lambda: iter(scan.collect_batches(chunk_size=BATCH_ROWS, maintain_order=True)))
        while (batch := self._guarded(lambda: next(batches, None))) is not None:
            yield batch

    def _scan(self) -> pl.LazyFrame:
        # An absolute path, because Polars takes a leading ~ for a home folder; and no path is a pattern.
        path = self.path.absolute()
        if self.kind == "parquet":
            if self.is_compressed:
                raise CatalogError(f"{self.path}: Parquet inside another compression; unpack it first")
            return pl.scan_parquet(path, glob=False, hive_partitioning=False)
        if self._begin.startswith(_UTF16):
            raise CatalogError(f"{self.path}: expected UTF-8, got UTF-16; convert it, e.g. with iconv")
        if not self._begin:
            raise CatalogError(f"{self.path}: not readable: the file is empty")
        if self.kind == "csv":
            # Text only: a guessed type would turn "007" into 7 before anything could object.
            return pl.scan_csv(path, infer_schema=False, glob=False)
        schema = self.__dict__.get("_own_schema")  # known: not looked for in all lines once more
        return pl.scan_ndjson(glob.escape(str(path)), schema=schema, infer_schema_length=None)

    def _lines(self) -> pl.LazyFrame:
        """Lines that are not blank, as a column `line`, the byte order mark removed."""
        lines = pl.scan_lines(self.path.absolute(), glob=False)
        return lines.select(pl.col("line").str.strip_chars(" \t\r\ufeff")).filter(pl.col("line") != "")

    def _has_records(self) -> bool:
        """Whether a file named .json has one object per line, not one object of item -> codes."""
        if self._begin.startswith(_UTF16):
            return False
        lines = self._guarded(lambda: self._lines().head(2).collect()["line"].to_list())
        if not lines or not lines[0].startswith("{") or (len(lines) == 1 and len(lines[0]) > _SHORT_LINE):
            return False
        try:
            first = json.loads(lines[0])
        except ValueError:
            return False
        return len(lines) > 1 or not _RECORD_KEYS.isdisjoint(first)

    def _refuse_repeated_keys(self, columns: list[str]) -> None:
        """Refuse a line of JSON that names a column twice: readers take the first or the last, as they like."""
        spelled = {name: json.dumps(name, ensure_ascii=False) for name in columns}
        keys = [pl.col("line").str.count_matches(f"{pl.escape_regex(key)}\\s*:") > 1 for key in spelled.values()]
        suspects = self._lines().with_row_index("row").filter(pl.any_horizontal(keys))
        # Few or none: the pattern also counts keys of objects inside and text that looks like a key.
        for row, line in self._guarded(lambda: suspects.collect().rows()) if keys else ():
            names = [name for name, _ in self._parsed(line)]
            for name in columns:
                if names.count(name) > 1:
                    raise fault(self.path, name, row, "stands twice in this line")

    @cached_property
    def _item_codes(self) -> pl.DataFrame:
        """JSON of item -> codes. Keys that stand twice stay two rows, for the build to refuse or drop."""
        path = self.path
        if self.is_compressed:
            text: str | bytes = "\n".join(self._guarded(lambda: self._lines().collect()["line"].to_list()))
        else:
            text = path.read_bytes()
        pairs = self._parsed(text)
        if not isinstance(pairs, list) or any(not isinstance(pair, tuple) for pair in pairs):
            hint = "; a list is read as JSON lines, one object per line" if isinstance(pairs, list) and pairs else ""
            raise CatalogError(f"{path}: expected one JSON object of item -> codes{hint}")
        kind = type(pairs[0][1][0]) if pairs and isinstance(pairs[0][1], list) and pairs[0][1] else int
        if kind not in (int, str):
            raise CatalogError(f"{path}: item {pairs[0][0]!r}: expected a list of codes, got {pairs[0][1]!r}"[:300])
        for row, (item, codes) in enumerate(pairs):
            if not isinstance(codes, list) or any(type(code) is not kind for code in codes):
                what = "integers" if kind is int else "strings"
                raise CatalogError(f"{path}: item {item!r} (row {row}): expected a list of {what}, got {codes!r}"[:300])
        items, codes = [item for item, _ in pairs], [codes for _, codes in pairs]
        try:
            inner = pl.Int64 if kind is int else pl.String
            return pl.DataFrame({"item_id": items, "codes": codes}, {"item_id": pl.String, "codes": pl.List(inner)})
        except (TypeError, OverflowError, pl.exceptions.PolarsError) as error:
            raise CatalogError(f"{path}: codes beyond 64 bits: {error}") from None

    def _parsed(self, text: str | bytes) -> Any:
        """JSON with each object as the list of its pairs."""
        try:
            return json.loads(text, object_pairs_hook=lambda pairs: pairs)
        except (ValueError, RecursionError) as error:
            raise CatalogError(f"{self.path}: not readable: {error}") from None

    def _guarded(self, read: Callable[[], T]) -> T:
        """What `read` returns; a fault of the file itself becomes one line that names it."""
        try:
            return read()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise CatalogError(f"{self.path}: not readable: {str(error).splitlines()[0]}") from None


def open_tables(path: str | Path) -> list[TableFile]:
    """The files of an input, see `find_files`."""
    return [TableFile(found) for found in find_files(path)]


@dataclass(frozen=True)
class Table:
    """A whole table in memory.

    Attributes:
        path: the input, as the user named it.
        frame: all rows, of all files in order.
        untyped: columns whose text may stand for numbers and booleans, as in CSV.
        first_rows: file and number of its first row.
    """

    path: Path
    frame: pl.DataFrame
    untyped: frozenset[str]
    first_rows: tuple[tuple[Path, int], ...]

    def fault(self, column: str, row: int, what: str) -> CatalogError:
        """What is wrong with one row of a column; names its file, and its number there."""
        file, first = next((file, first) for file, first in reversed(self.first_rows) if first <= row)
        return fault(file, column, row - first, what)

    def item_ids(self, column: str, *, text: bool | None = None) -> pl.Series:
        """Checked item ids Int64 or String; `text`: which of them is meant, None: what the column's type says."""
        dtype = self.frame.schema[column]
        if text is None:
            text = dtype in (pl.String, pl.Categorical, pl.Enum)
        if dtype.is_float() or dtype.is_nested() or dtype == pl.Boolean:
            raise CatalogError(f"{self.path}: column {column!r}: expected integers or strings, got {dtype}")
        ends = [first for _, first in self.first_rows[1:]] + [len(self.frame)]
        parts = [
            read_ids(self.frame[first:end], file, 0, column, text=text, typed=column not in self.untyped)[0]
            for (file, first), end in zip(self.first_rows, ends, strict=True)
        ]
        return pl.concat(parts)


def read_table(path: str | Path, columns: Collection[str] | None = None) -> Table:
    """All rows of a file, a folder or a pattern.

    Columns are the same in all files. A column without any value in a file has the type that it has in the others, and
    integers of all widths become Int64.

    Args:
        columns: which to read; all of them by default.

    Raises:
        CatalogError: names the file: not readable, a column that is missing or that others do not have, another type.
    """
    files = open_tables(path)
    wanted = list(files[0].schema if columns is None else columns)
    for file in files:
        for name in wanted:
            if name not in file.schema:
                raise CatalogError(
                    f"{file.path}: column {name!r}: missing; {what_there_is(file.path, file.schema, name)}"
                )
        if columns is None and (more := [name for name in file.schema if name not in wanted]):
            raise CatalogError(f"{file.path}: column {more[0]!r}: {files[0].path} does not have it")
    types = {name: _common_type(name, files) for name in wanted}
    frames, first_rows, rows = [], [], 0
    for file in files:
        first_rows.append((file.path, rows))
        row = 0
        for part in file.frames(wanted):
            frames.append(part.with_columns(_as_type(part[name], types[name], file.path, row) for name in wanted))
            row += len(part)
        rows += row
    frame = pl.concat(frames, rechunk=True) if frames else pl.DataFrame(schema=types)
    untyped = frozenset(name for name in wanted if any(not file.is_typed(name) for file in files))
    return Table(Path(path), frame, untyped, tuple(first_rows))


def _common_type(name: str, files: list[TableFile]) -> pl.DataType:
    common, first = pl.Null(), files[0].path
    for file in files:
        dtype = pl.Int64() if file.schema[name].is_integer() else file.schema[name]
        if holds_nothing(common):
            common, first = dtype, file.path
        elif dtype != common and not holds_nothing(dtype):
            raise CatalogError(f"{file.path}: column {name!r}: {dtype}, but {first} has {common}")
    return common


def _as_type(series: pl.Series, dtype: pl.DataType, file: Path, row: int) -> pl.Series:
    if series.dtype == dtype:
        return series
    if not series.dtype.is_integer():  # nothing but nulls
        return series.cast(dtype)
    numbers = series.cast(pl.Int64, strict=False)
    lost = numbers.is_null() & series.is_not_null()
    if lost.any():
        at = int(lost.arg_max() or 0)
        raise fault(file, series.name, row + at, f"expected an integer of 64 bits, got {series[at]!r}")
    return numbers


def _compare(series: pl.Series, value: str | None, file: Path, row: int) -> None:
    """Refuse a column in the file that says something else than the folder's name."""
    wanted = None if value is None else value.lower()
    differs = series.cast(pl.String).str.to_lowercase().ne_missing(pl.Series([wanted], dtype=pl.String))
    if differs.any():
        at = int(differs.arg_max() or 0)
        raise fault(file, series.name, row + at, f"{series[at]!r}, but the folder of the file says {value!r}")
