"""From columns of a table to codes, item ids and named sets; every fault names file, column and row."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from trieton.index.catalog import MAX_ID_BYTES
from trieton.retriever.spec import TokenMap

from trieton_builder.catalogue.code_text import CodeText
from trieton_builder.catalogue.faults import CatalogError, fault
from trieton_builder.catalogue.keys import KeyLayout
from trieton_builder.catalogue.set_lists import LISTS, add_names, as_lists, numbered

NO_ITEM = -1  # pads the ids of an answer
TRUE, FALSE = ("true", "True", "TRUE", "1"), ("false", "False", "FALSE", "0")


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold what.

    Attributes:
        codes: one list column, or one column per level; empty: `codes` where it exists, else `code_0`, `code_1`, ...
        item_id: column of item ids; None: rows number the items.
        text_ids: item ids are strings. Has to be said of CSV and of JSON of item -> codes, which have no types; else
            those are integers.
        set_columns: columns of booleans, or of 0 and 1; each is a named set of its own name.
        set_names: a column with the names of an item's sets: a list, or text with separators.
        set_separator: between names in text.
        variable_length: semantic IDs may be shorter than the number of levels: shorter lists, nulls in the last levels.
        code_pattern: a regular expression with one group, for codes that are text such as `<a_12>`.
    """

    codes: tuple[str, ...] = ()
    item_id: str | None = "item_id"
    text_ids: bool = False
    set_columns: tuple[str, ...] = ()
    set_names: str | None = None
    set_separator: str = "|"
    variable_length: bool = False
    code_pattern: str | None = None

    def __post_init__(self) -> None:
        named = {
            "codes": self.codes,
            "item_id": (self.item_id,),
            "set": self.set_columns,
            "set_names": (self.set_names,),
        }
        for what, names in named.items():
            if any(name is not None and not name.strip() for name in names):
                raise ValueError(f"{what}: expected the name of a column, got an empty one")
        if not self.set_separator.strip():
            raise ValueError(f"set_separator: expected a character between names, got {self.set_separator!r}")
        if self.code_pattern is not None:
            CodeText(self.code_pattern)

    def code_columns(self, file: Path, schema: pl.Schema, num_levels: int) -> list[str]:
        """The columns with codes: one, or one per level."""
        levels = [f"code_{level}" for level in range(num_levels)]
        names = list(self.codes) or (["codes"] if "codes" in schema else levels)
        there = next(level for level in range(len(schema) + 1) if f"code_{level}" not in schema)
        if names == levels and there not in (0, num_levels):
            raise CatalogError(
                f"{file}: {num_levels} codebook sizes, but {there} columns of codes: code_0 to code_{there - 1}; "
                "give one size per column, or name the columns to read"
            )
        if len(names) not in (1, num_levels):
            raise CatalogError(
                f"{file}: expected one list column or {num_levels} columns of codes, got {len(names)}: {names}"
            )
        return names

    def needed(self, file: Path, schema: pl.Schema, num_levels: int) -> list[str]:
        """All columns that are read, each once."""
        names = [*self.code_columns(file, schema, num_levels), *self.set_columns]
        names += [name for name in (self.item_id, self.set_names) if name is not None]
        return list(dict.fromkeys(names))

    def check(self, file: Path, schema: pl.Schema, num_levels: int) -> None:
        """Refuse a file that lacks a column or has one of another type."""
        for name in self.needed(file, schema, num_levels):
            if name not in schema:
                raise CatalogError(f"{file}: column {name!r}: missing; {what_there_is(file, schema, name)}")
        for name in self.set_columns:
            if not may_be_set(schema[name]):
                raise CatalogError(f"{file}: column {name!r}: expected booleans, or 0 and 1, got {schema[name]}")

    def ids_are_text(self, file: Path, dtype: pl.DataType, *, typed: bool) -> bool:
        """Whether the item ids of a file with such a column are strings; `typed`: whether the column's type says it."""
        if not typed:
            return self.text_ids
        if dtype.is_integer():
            if self.text_ids:
                raise CatalogError(f"{file}: column {self.item_id!r}: declared as strings, got {dtype}")
            return False
        if dtype in (pl.String, pl.Categorical, pl.Enum):
            return True
        raise CatalogError(f"{file}: column {self.item_id!r}: expected integers or strings, got {dtype}")


def read_codes(
    part: pl.DataFrame,
    file: Path,
    row: int,
    columns: Columns,
    layout: KeyLayout,
    token_map: TokenMap | None,
    text: CodeText | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes int64 [n, num_levels] of a batch that starts at `row` of `file`, and lengths int64 [n] where they vary.

    `text` reads what `columns.code_pattern` describes, and is the same for all batches.

    Level-local codes are not yet compared with their codebooks; tokens are, while they are mapped to codes.
    """
    names = columns.code_columns(file, part.schema, layout.num_levels)
    if len(names) == 1 and (layout.num_levels > 1 or not part[names[0]].dtype.is_integer()):
        codes, lengths = _from_lists(part[names[0]], file, row, columns, layout.num_levels, text)
    else:
        codes, lengths = _from_levels([part[name] for name in names], file, row, columns, text)
    if token_map is not None:
        codes, lengths = _from_tokens(codes, lengths, token_map, names, file, row, columns.variable_length)
    return codes, lengths


def _from_levels(
    series: list[pl.Series], file: Path, row: int, columns: Columns, text: CodeText | None
) -> tuple[np.ndarray, np.ndarray | None]:
    present = np.ones((len(series[0]), len(series)), np.bool_)
    codes = np.zeros(present.shape, np.int64)
    for level, column in enumerate(series):
        rows = np.arange(len(column))
        numbers = _integers(column, file, row, rows, np.full(len(column), level), text)
        if numbers.null_count():
            present[:, level] = numbers.is_not_null().to_numpy()
            if not columns.variable_length or level == 0:
                raise fault(file, column.name, row + int(np.argmin(present[:, level])), "a code is missing")
            numbers = numbers.fill_null(0)
        codes[:, level] = numbers.to_numpy()
    if present.all():
        return codes, None
    gap = (present[:, 1:] & ~present[:, :-1]).any(axis=1)
    if gap.any():
        raise fault(file, series[0].name, row + int(np.argmax(gap)), "a code is missing before the last one")
    return codes, present.sum(axis=1)


def _from_lists(
    series: pl.Series, file: Path, row: int, columns: Columns, num_levels: int, text: CodeText | None
) -> tuple[np.ndarray, np.ndarray | None]:
    name = series.name
    if isinstance(series.dtype, pl.Array):
        series = series.arr.to_list()
    if series.dtype == pl.String:
        series = _split_text(series, file, row, text)
    if series.dtype == pl.Null:
        series = series.cast(pl.List(pl.Int64))
    if not isinstance(series.dtype, pl.List):
        raise fault(file, name, row, f"expected a list of {num_levels} codes, got {series.dtype} {series[0]!r}")
    if series.null_count():
        raise fault(file, name, row + int(series.is_null().arg_max() or 0), "codes are missing")
    lengths = series.list.len().to_numpy().astype(np.int64)
    shortest = 1 if columns.variable_length else num_levels
    wrong = (lengths < shortest) | (lengths > num_levels)
    if wrong.any():
        at = int(np.argmax(wrong))
        what = f"1 to {num_levels}" if columns.variable_length else str(num_levels)
        hint = "" if columns.variable_length or lengths[at] > num_levels else "; different lengths have to be declared"
        raise fault(file, name, row + at, f"expected {what} codes, got {lengths[at]}{hint}")
    owners = np.repeat(np.arange(len(series)), lengths)
    flat = series.explode(empty_as_null=False) if len(series) else pl.Series(name, [], pl.Int64)
    levels = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    numbers = _integers(flat, file, row, owners, levels, text)
    if numbers.null_count():
        at = int(owners[int(numbers.is_null().arg_max() or 0)])
        raise fault(file, name, row + at, "a code is missing")
    codes = np.zeros((len(series), num_levels), np.int64)
    codes[np.arange(num_levels) < lengths[:, None]] = numbers.to_numpy()
    return codes, (lengths if (lengths < num_levels).any() else None)


def _split_text(series: pl.Series, file: Path, row: int, text: CodeText | None) -> pl.Series:
    """Lists from text: `[1, 2, 3]`, `1 2 3`, or with a pattern `<a_1><b_2>`."""
    if text is None:
        return series.str.strip_chars(" []").str.replace_all(r"\s*,\s*|\s+", " ").str.split(" ")
    lists, odd = text.split(series)
    if odd is not None:
        raise fault(file, series.name, row + odd, f"expected codes like {text.pattern}, got {series[odd]!r}")
    return lists


def _integers(
    series: pl.Series, file: Path, row: int, owners: np.ndarray, levels: np.ndarray, text: CodeText | None
) -> pl.Series:
    """Int64 of an integer column, or of text that holds integers; nulls stay.

    Args:
        owners: the row of each value, counted from `row`, and `levels` its level.
    """
    if series.dtype.is_integer():
        numbers = series.cast(pl.Int64, strict=False)
    elif series.dtype == pl.String:
        numbers = series.cast(pl.Int64, strict=False) if text is None else text.numbers(series)
    elif series.dtype == pl.Null:
        return series.cast(pl.Int64)
    else:
        first = series.drop_nulls()
        got = f"{series.dtype}" + (f" ({first[0]!r}, ...)" if len(first) else "")
        raise fault(file, series.name, row, f"expected integers, got {got}; convert them where they are made")
    failed = numbers.is_null() & series.is_not_null()
    if failed.any():
        at = int(failed.arg_max() or 0)
        what = "an integer of 64 bits" if text is None else f"a code like {text.pattern}"
        raise fault(file, series.name, row + int(owners[at]), f"expected {what}, got {series[at]!r}")
    if text is not None and series.dtype == pl.String:
        there = np.flatnonzero(series.is_not_null().to_numpy())
        if wrong := text.check_levels(series.drop_nulls(), levels[there]):
            at, what = wrong
            raise fault(file, series.name, row + int(owners[there[at]]), what)
    return numbers


def _from_tokens(
    tokens: np.ndarray,
    lengths: np.ndarray | None,
    token_map: TokenMap,
    names: list[str],
    file: Path,
    row: int,
    variable_length: bool,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes from model tokens; the end token, where written, ends the semantic ID."""
    inside = np.ones(tokens.shape, np.bool_)
    if lengths is not None:
        inside = np.arange(tokens.shape[1]) < lengths[:, None]
    if token_map.end_token is not None:
        ended = inside & (tokens == token_map.end_token)
        ended[:, 0] = False
        if ended.any():
            if not variable_length:
                at = int(np.argmax(ended.any(axis=1)))
                raise fault(file, names[0], row + at, "has the end token; different lengths have to be declared")
            inside &= ~np.logical_or.accumulate(ended, axis=1)
            lengths = inside.sum(axis=1)
    codes = np.zeros_like(tokens)
    for level, known in enumerate(token_map.levels):
        column = tokens[:, level]
        if isinstance(known, range):
            codes[:, level] = column - known.start
            valid = (column >= known.start) & (column < known.stop)
            what = f"tokens {known.start} to {known.stop - 1}"
        else:
            order = np.argsort(known)
            place = np.minimum(np.searchsorted(known, column, sorter=order), len(known) - 1)
            codes[:, level] = order[place]
            valid = np.asarray(known)[codes[:, level]] == column
            what = f"one of its {len(known)} tokens"
        wrong = inside[:, level] & ~valid
        if wrong.any():
            at = int(np.argmax(wrong))
            hint = "; are these level-local codes?" if column[at] < len(known) else ""
            name = names[level] if len(names) > 1 else names[0]
            raise fault(file, name, row + at, f"level {level}: expected {what}, got {column[at]}{hint}")
    return codes, lengths


def read_ids(
    part: pl.DataFrame, file: Path, row: int, name: str, *, text: bool, typed: bool = True
) -> tuple[pl.Series, int]:
    """Item ids Int64 or String, and the bytes of the longest text id.

    `typed`: whether the type of the column says what its values are. Without it blanks around an id may be the
    writer's or the id's, and are refused; so is a number that is not written as numbers are, such as 007.
    """
    series = part[name]
    if series.null_count():
        raise fault(file, name, row + int(series.is_null().arg_max() or 0), "the item id is missing")
    if not text:
        return _integer_ids(series, file, row), 0
    series = series.cast(pl.String)
    sizes = series.str.len_bytes()
    wrong = (sizes == 0) | (sizes > MAX_ID_BYTES) | series.str.contains("\0", literal=True)
    if wrong.any():
        at = int(wrong.arg_max() or 0)
        got = f"{series[at][:40]!r} ({sizes[at]} bytes)"
        raise fault(file, name, row + at, f"expected an item id of 1 to {MAX_ID_BYTES} bytes without NUL, got {got}")
    blanks = series != series.str.strip_chars()
    if not typed and blanks.any():
        at = int(blanks.arg_max() or 0)
        raise fault(file, name, row + at, f"expected an item id without blanks around it, got {series[at]!r}")
    return series, int(sizes.max() or 0)


def _integer_ids(series: pl.Series, file: Path, row: int) -> pl.Series:
    numbers = series.cast(pl.Int64, strict=False)
    wrong = numbers.is_null()
    if series.dtype == pl.String:  # the cast takes 007 and +7 for 7
        wrong |= numbers.cast(pl.String).ne_missing(series)
    if wrong.any():
        at = int(wrong.arg_max() or 0)
        hint = "; strings have to be declared" if series.dtype == pl.String else ""
        raise fault(file, series.name, row + at, f"expected an integer item id of 64 bits, got {series[at]!r}{hint}")
    if (numbers == NO_ITEM).any():
        at = int((numbers == NO_ITEM).arg_max() or 0)
        raise fault(
            file, series.name, row + at, f"{NO_ITEM} is no item id: in an answer it means that there is no item"
        )
    return numbers


def may_be_set(dtype: pl.DataType) -> bool:
    """Whether a column of this type can be a named set, see `as_booleans`."""
    return dtype in (pl.Boolean, pl.String, pl.Null) or dtype.is_integer()


def holds_nothing(dtype: pl.DataType) -> bool:
    """Whether a column of this type holds nulls and empty lists only: a part of a table in which nothing was set."""
    return dtype == pl.Null or (isinstance(dtype, pl.List) and dtype.inner == pl.Null)


def as_booleans(series: pl.Series, file: Path, row: int = 0) -> pl.Series:
    """A named set from a column of booleans, of 0 and 1, or of text that says one of these; `row` is that of its first.

    Raises:
        CatalogError: another value, or none.
    """
    if series.null_count():
        raise fault(file, series.name, row + int(series.is_null().arg_max() or 0), "the value is missing")
    if series.dtype in (pl.Boolean, pl.Null):
        return series.cast(pl.Boolean)
    known = series.is_in([0, 1] if series.dtype.is_integer() else [*TRUE, *FALSE])
    if not known.all():
        at = int(known.arg_min() or 0)
        raise fault(file, series.name, row + at, f"expected true or false, or 0 and 1, got {series[at]!r}")
    return series == 1 if series.dtype.is_integer() else series.is_in(TRUE)


def says_true_or_false(series: pl.Series) -> bool:
    """Whether a column holds booleans, or nothing but those words; numbers may mean anything."""
    if series.dtype == pl.String:
        words = [word for word in (*TRUE, *FALSE) if not word.isdigit()]
        return len(series) > series.null_count() and bool(series.drop_nulls().is_in(words).all())
    return series.dtype == pl.Boolean


def add_set_names(known: set[str], part: pl.DataFrame, file: Path, row: int, columns: Columns) -> int:
    """Add the names in the column of set names to `known`; returns how many memberships they make."""
    lists = as_lists(part[columns.set_names or ""], columns.set_separator, file, row)
    return add_names(known, lists, file, row)


def read_sets(
    part: pl.DataFrame, file: Path, row: int, columns: Columns, names: tuple[str, ...]
) -> dict[str, pl.Series]:
    """The sets of a batch: `set{number}` Boolean per column of booleans, and `sets` List(Int32) of the listed ones."""
    number = {name: i for i, name in enumerate(names)}
    held = {f"set{number[name]}": as_booleans(part[name], file, row) for name in columns.set_columns}
    if columns.set_names is not None:
        held[LISTS] = numbered(as_lists(part[columns.set_names], columns.set_separator, file, row), names, file)
    return held


def what_there_is(file: Path, schema: pl.Schema, name: str) -> str:
    """Why a column may be missing."""
    there = ", ".join(column if column.isprintable() else repr(column) for column in schema) or "no columns"
    folder = next((part for part in reversed(file.parent.parts) if part.startswith(f"{name}=")), None)
    if folder:
        return f"the file has {there}; to read the folder {folder!r} as a column, name a folder above it"
    separator = next((mark for mark in (";", "\t", "|") if len(schema) == 1 and mark in there), None)
    if separator:
        return f"the file has {there}; it is separated by {separator!r}, expected commas"
    return f"the file has {there}"
