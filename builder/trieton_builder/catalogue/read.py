"""Catalogues as people have them: Parquet, CSV, JSON lines, or JSON of item -> codes, read in checked batches.

Every engine of the build reads through here, so a fault has one text, with file, column and row, wherever it is met.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from trieton.index.named_sets import check_set_names
from trieton.retriever.spec import TokenMap

from trieton_builder.catalogue.code_text import CodeText
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
from trieton_builder.catalogue.tables import TableFile, open_tables

_HEAD_ROWS = 1000
_UNPACKED = 8  # how many times larger text is than its compressed file, about


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
        path: a file, a folder or a pattern, see `find_files`; several files are read in order of their paths and
            number their rows on.
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
        self.files = open_tables(self.path)
        if self.token_map is not None and self.token_map.sizes != self.layout.sizes:
            theirs = list(self.token_map.sizes)
            raise ValueError(f"token map: its levels have {theirs} tokens, the codebooks {list(self.layout.sizes)}")
        for file in self.files:
            self.columns.check(file.path, file.schema, self.layout.num_levels)
        self.text_ids = self._text_ids()
        self.set_names = self._set_names()

    def batches(self) -> Iterator[InputBatch]:
        """All rows.

        Raises:
            CatalogError: names file, column and row of the first thing that is wrong.
        """
        self._first_rows.clear()
        pattern = self.columns.code_pattern
        text = CodeText(pattern) if pattern is not None else None
        first = 0
        for file in self.files:
            self._first_rows.append((first, file.path))
            row = 0
            for part in file.frames(self._needed(file)):
                yield self._checked(part, file, row, first + row, text)
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
        used = self._needed(self.files[0])
        head = self.files[0].head(_HEAD_ROWS)
        return [column.name for column in head if column.name not in used and says_true_or_false(column)]

    def estimated_rows(self) -> int:
        """Rows of all files; a guess from their size where a format does not say."""
        rows = 0
        for file in self.files:
            known = file.num_rows()
            size = file.path.stat().st_size * (_UNPACKED if file.is_compressed else 1)
            rows += size // (3 * self.layout.num_levels) if known is None else known
        return rows

    def _checked(self, part: pl.DataFrame, file: TableFile, row: int, first: int, text: CodeText | None) -> InputBatch:
        path, name = file.path, self.columns.item_id
        codes, lengths = read_codes(part, path, row, self.columns, self.layout, self.token_map, text)
        keys, (bad, bad_row, level) = self.layout.pack(codes, lengths)
        if bad:
            self._refuse(file, row + bad_row, level, int(codes[bad_row, level]), bad)
        data: dict[str, object] = {f"key{k}": values for k, values in enumerate(keys)}
        data["row"] = np.arange(first, first + len(part), dtype=np.int64)
        id_bytes = 0
        if name is not None:
            ids, id_bytes = read_ids(part, path, row, name, text=self.text_ids, typed=file.is_typed(name))
            data["id"] = ids
        data |= read_sets(part, path, row, self.columns, self.set_names)
        short = lengths is not None and bool((lengths < self.layout.num_levels).any())
        return InputBatch(pl.DataFrame(data), short, id_bytes)

    def _refuse(self, file: TableFile, row: int, level: int, code: int, bad: int) -> None:
        names = self.columns.code_columns(file.path, file.schema, self.layout.num_levels)
        name = names[level] if len(names) > 1 else names[0]
        size = self.layout.sizes[level]
        text = f"{file.path}: column {name!r}: row {row}, level {level}: expected 0 <= code < {size}, got {code}"
        if bad > 1:
            text += f" ({bad} such codes in this batch)"
        if self.token_map is None and code >= size:
            text += "; if these are model tokens, declare their offsets or token map"
        raise CatalogError(text)

    def _needed(self, file: TableFile) -> list[str]:
        return self.columns.needed(file.path, file.schema, self.layout.num_levels)

    def _text_ids(self) -> bool:
        name = self.columns.item_id
        if name is None:
            return False
        kinds: dict[bool, TableFile] = {}
        for file in self.files:
            dtype = file.schema[name]
            if dtype == pl.Null and file.is_typed(name):
                continue  # no rows, or ids that are missing, which is told with the row
            text = self.columns.ids_are_text(file.path, dtype, typed=file.is_typed(name))
            kinds.setdefault(text, file)
            if len(kinds) > 1:
                first = kinds[not text]
                raise CatalogError(f"{file.path}: column {name!r}: {dtype}, but {first.path} has {first.schema[name]}")
        return next(iter(kinds), False)

    def _set_names(self) -> tuple[str, ...]:
        names = list(self.columns.set_columns)
        if self.columns.set_names is not None:
            found: set[str] = set()
            for file in self.files:
                row = 0
                for part in file.frames([self.columns.set_names]):
                    self.num_memberships += add_set_names(found, part, file.path, row, self.columns)
                    row += len(part)
            for name in sorted(found & set(names)):
                other = f"is a column and also a name in column {self.columns.set_names!r}"
                raise CatalogError(f"{self.path}: set {name!r} {other}")
            names += found
        try:
            check_set_names(names)
        except ValueError as error:
            raise CatalogError(f"{self.path}: {error}") from None
        return tuple(sorted(names))
