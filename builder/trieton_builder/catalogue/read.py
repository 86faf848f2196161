"""Catalogues as people have them: Parquet, CSV, JSON lines, or JSON of item -> codes, read in checked batches.

Every engine of the build reads through here, so a fault has one text, with file, column and row, wherever it is met.
"""

import glob
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars as pl
from trieton.index.named_sets import check_names
from trieton.retriever.spec import TokenMap

from trieton_builder.catalogue.columns import (
    CatalogError,
    Columns,
    add_set_names,
    read_codes,
    read_ids,
    read_sets,
    says_true_or_false,
)
from trieton_builder.catalogue.keys import KeyLayout

BATCH_ROWS = 1 << 18
_HEAD_ROWS = 1000
T = TypeVar("T")
_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "lines"}
_SUFFIXES[".ndjson"] = "lines"


@dataclass(frozen=True)
class InputBatch:
    """Checked rows in the order of the input.

    Attributes:
        frame: columns `key0`, `key1`, ... (Int64, packed codes), `row` (Int64, over all files), `id` (Int64 or String;
            absent where the rows number the items), `set{i}` (Boolean) for each set that is a column of its own, `sets`
            (List of Int32) for those named in lists; sets are numbered by their sorted names.
        has_short: whether a semantic ID is shorter than the number of levels.
        id_bytes: UTF-8 bytes of the longest text id.
    """

    frame: pl.DataFrame
    has_short: bool
    id_bytes: int


@dataclass
class CatalogSource:
    """One catalogue in one or more files.

    Attributes:
        path: a file, a folder (its Parquet, CSV or JSON-lines files) or a glob; several files are read in order of
            their paths and number their rows on.
        layout: levels and codebook sizes.
        columns: which columns hold what.
        token_map: declares that the codes are model tokens; None: they are level-local.
    """

    path: str
    layout: KeyLayout
    columns: Columns = field(default_factory=Columns)
    token_map: TokenMap | None = None
    num_memberships: int = field(default=0, init=False)  # entries in the column of set names
    _first_rows: list[tuple[int, Path]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.files = find_files(self.path)
        if self.token_map is not None and self.token_map.sizes != self.layout.sizes:
            theirs = list(self.token_map.sizes)
            raise ValueError(f"token map: its levels have {theirs} tokens, the codebooks {list(self.layout.sizes)}")
        schemas = {file: schema_of(file) for file in self.files}
        for file, schema in schemas.items():
            self.columns.check(file, schema, self.layout.num_levels)
        self.text_ids = self._text_ids(schemas)
        self.set_names = self._set_names()

    def batches(self) -> Iterator[InputBatch]:
        """All rows.

        Raises:
            CatalogError: names file, column and row of the first thing that is wrong.
        """
        self._first_rows.clear()
        first = 0
        for file in self.files:
            self._first_rows.append((first, file))
            row = 0
            for part in read_frames(file, self._needed(file)):
                yield self._checked(part, file, row, first + row)
                row += len(part)
            first += row
        if not first:
            raise CatalogError(f"{self.path}: no rows; an empty catalogue is not built from files")

    def describe(self, row: int) -> str:
        """How messages call a row: its file, and its number there."""
        first, file = next((f, p) for f, p in reversed(self._first_rows) if f <= row)
        return f"{file} row {row - first}"

    def unused_booleans(self) -> list[str]:
        """Columns of the first file that could be named sets and are not read, by its first rows."""
        file = self.files[0]
        if kind_of(file) == "json":
            return []
        used = self._needed(file)
        head = _guarded(file, lambda: _scan(file, kind_of(file)).head(_HEAD_ROWS).collect())
        return [column.name for column in head if column.name not in used and says_true_or_false(column)]

    def estimated_rows(self) -> int:
        """Rows of all files; a guess from their size where a format does not say."""
        rows = 0
        for file in self.files:
            if kind_of(file) == "parquet":
                rows += pl.scan_parquet(file).select(pl.len()).collect().item()
            else:
                rows += file.stat().st_size // (3 * self.layout.num_levels)
        return rows

    def _checked(self, part: pl.DataFrame, file: Path, row: int, first: int) -> InputBatch:
        codes, lengths = read_codes(part, file, row, self.columns, self.layout, self.token_map)
        keys, (bad, bad_row, level) = self.layout.pack(codes, lengths)
        if bad:
            self._refuse(file, row + bad_row, level, int(codes[bad_row, level]), bad)
        data: dict[str, object] = {f"key{k}": values for k, values in enumerate(keys)}
        data["row"] = np.arange(first, first + len(part), dtype=np.int64)
        id_bytes = 0
        if self.columns.item_id is not None:
            ids, id_bytes = read_ids(part, file, row, self.columns.item_id, text=self.text_ids)
            data["id"] = ids
        data |= read_sets(part, file, row, self.columns, self.set_names)
        short = lengths is not None and bool((lengths < self.layout.num_levels).any())
        return InputBatch(pl.DataFrame(data), short, id_bytes)

    def _refuse(self, file: Path, row: int, level: int, code: int, bad: int) -> None:
        names = self.columns.code_columns(file, schema_of(file), self.layout.num_levels)
        name = names[level] if len(names) > 1 else names[0]
        size = self.layout.sizes[level]
        text = f"{file}: column {name!r}: row {row}, level {level}: expected 0 <= code < {size}, got {code}"
        if bad > 1:
            text += f" ({bad} such codes in this batch)"
        if self.token_map is None and code >= size:
            text += "; if these are model tokens, declare their offsets or token map"
        raise CatalogError(text)

    def _needed(self, file: Path) -> list[str]:
        return self.columns.needed(file, schema_of(file), self.layout.num_levels)

    def _text_ids(self, schemas: dict[Path, pl.Schema]) -> bool:
        name = self.columns.item_id
        if name is None:
            return False
        kinds = {file: self.columns.ids_are_text(file, schema[name]) for file, schema in schemas.items()}
        first = next(iter(kinds))
        for file, text in kinds.items():
            if text != kinds[first]:
                theirs = f"{first} has {schemas[first][name]}"
                raise CatalogError(f"{file}: column {name!r}: {schemas[file][name]}, but {theirs}")
        return kinds[first]

    def _set_names(self) -> tuple[str, ...]:
        names = list(self.columns.set_columns)
        if self.columns.set_names is not None:
            found: set[str] = set()
            for file in self.files:
                row = 0
                for part in read_frames(file, [self.columns.set_names]):
                    self.num_memberships += add_set_names(found, part, file, row, self.columns)
                    row += len(part)
            for name in sorted(found & set(names)):
                other = f"is a column and also a name in column {self.columns.set_names!r}"
                raise CatalogError(f"{self.path}: set {name!r} {other}")
            names += found
        try:
            check_names(names)
        except ValueError as error:
            raise CatalogError(f"{self.path}: {error}") from None
        return tuple(sorted(names))


def find_files(path: str) -> list[Path]:
    """Files of a path, a folder or a glob, in order of their paths.

    Raises:
        CatalogError: nothing there, or a kind that is not read.
    """
    place = Path(path)
    if place.is_dir():
        # Hidden names and _SUCCESS are what engines leave beside their parts.
        files = [p for p in place.rglob("*") if p.is_file() and p.suffix.lower() in _SUFFIXES and p.name[0] not in "._"]
        if not files:
            raise CatalogError(f"{path}: no {', '.join(_SUFFIXES)} file in this folder")
    elif place.is_file():
        files = [place]
    else:
        files = [Path(p) for p in glob.glob(path, recursive=True) if Path(p).is_file()]
        if not files:
            raise CatalogError(f"{path}: no such file or folder, and as a pattern it matches no file")
    for file in files:
        kind_of(file)
    return sorted(files)


def kind_of(file: Path) -> str:
    """parquet, csv, lines or json, by the file's suffix."""
    kind = _SUFFIXES.get(file.suffix.lower())
    if kind is None:
        raise CatalogError(f"{file}: expected one of {', '.join(_SUFFIXES)}, got {file.suffix or 'no suffix'!r}")
    return kind


def schema_of(file: Path) -> pl.Schema:
    """Columns and types of a file; CSV has text only, and JSON of item -> codes has `item_id` and `codes`."""
    kind = kind_of(file)
    if kind == "json":  # its codes may also be text; that is seen when they are read
        return pl.Schema({"item_id": pl.String, "codes": pl.List(pl.Int64)})
    return _guarded(file, lambda: _scan(file, kind).collect_schema())


def read_frames(file: Path, columns: list[str]) -> Iterator[pl.DataFrame]:
    """The rows of a file in order, `BATCH_ROWS` at a time, with these columns only."""
    kind = kind_of(file)
    if kind == "json":
        whole = _read_json(file).select(columns)
        yield from (whole[start : start + BATCH_ROWS] for start in range(0, len(whole), BATCH_ROWS))
        return
    scan = _scan(file, kind).select(columns)
    batches = _guarded(file, lambda: iter(scan.collect_batches(chunk_size=BATCH_ROWS, maintain_order=True)))
    while (batch := _guarded(file, lambda: next(batches, None))) is not None:
        for start in range(0, len(batch), BATCH_ROWS):
            yield batch[start : start + BATCH_ROWS]


def _scan(file: Path, kind: str) -> pl.LazyFrame:
    if kind == "parquet":
        return pl.scan_parquet(file, glob=False)
    if kind == "csv":
        # Text only: a guessed type would turn "007" into 7 before anything could object.
        return pl.scan_csv(file, infer_schema=False, glob=False)
    return pl.scan_ndjson(file)


def _guarded(file: Path, read: Callable[[], T]) -> T:
    """What `read` returns; a fault of the file itself becomes one line that names it."""
    try:
        return read()
    except pl.exceptions.PolarsError as error:
        raise CatalogError(f"{file}: not readable: {str(error).splitlines()[0]}") from None


def _read_json(file: Path) -> pl.DataFrame:
    """JSON of item -> codes. Keys that stand twice stay two rows, for the build to refuse or drop."""
    try:
        pairs = json.loads(file.read_bytes(), object_pairs_hook=lambda pairs: pairs)
    except ValueError as error:
        raise CatalogError(f"{file}: not readable: {error}") from None
    if not isinstance(pairs, list) or any(not isinstance(pair, tuple) for pair in pairs):
        raise CatalogError(f"{file}: expected one JSON object of item -> codes")
    kind = type(pairs[0][1][0]) if pairs and isinstance(pairs[0][1], list) and pairs[0][1] else int
    if kind not in (int, str):
        raise CatalogError(f"{file}: item {pairs[0][0]!r}: expected a list of codes, got {pairs[0][1]!r}")
    for row, (item, codes) in enumerate(pairs):
        if not isinstance(codes, list) or any(type(code) is not kind for code in codes):
            what = "integers" if kind is int else "strings"
            raise CatalogError(f"{file}: item {item!r} (row {row}): expected a list of {what}, got {codes!r}"[:300])
    items, codes = [item for item, _ in pairs], [codes for _, codes in pairs]
    try:
        inner = pl.Int64 if kind is int else pl.String
        return pl.DataFrame({"item_id": items, "codes": codes}, {"item_id": pl.String, "codes": pl.List(inner)})
    except (TypeError, OverflowError, pl.exceptions.PolarsError) as error:
        raise CatalogError(f"{file}: codes beyond 64 bits: {error}") from None
