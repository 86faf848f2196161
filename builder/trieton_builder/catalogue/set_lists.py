"""Columns with the names of an item's sets, as lists or as text with separators: one rule for build and refresh."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
from trieton.index.named_sets import MAX_SETS, name_fault

from trieton_builder.catalogue.faults import CatalogError, fault

LISTS = "sets"  # the column of set numbers in a table of checked rows; a set of its own is column `set{number}`
_ROWS = 1 << 15  # of which the names are held apart at a time


def as_lists(series: pl.Series, separator: str, file: Path, row: int = 0) -> pl.Series:
    """The names of each row's sets, List(String) without nulls; no list and a blank text mean no set.

    Args:
        row: number of the first row, for messages.

    Raises:
        CatalogError: another type, or a name that is missing or empty.
    """
    if isinstance(series.dtype, pl.Array):
        series = series.arr.to_list()
    if series.dtype in (pl.String, pl.Categorical, pl.Enum):
        text = series.cast(pl.String).fill_null("").str.strip_chars()
        lists = text.str.split(separator).list.eval(pl.element().str.strip_chars())
        lists = lists.zip_with(text != "", pl.Series([[]], dtype=pl.List(pl.String)))
    elif isinstance(series.dtype, pl.List) and series.dtype.inner in (pl.String, pl.Categorical, pl.Enum, pl.Null):
        lists = series.cast(pl.List(pl.String)).fill_null([])
    elif series.dtype == pl.Null:
        lists = pl.Series(series.name, [[]] * len(series), dtype=pl.List(pl.String))
    else:
        raise CatalogError(f"{file}: column {series.name!r}: expected text or lists of text, got {series.dtype}")
    names = flat_names(lists)
    empty = names.is_null() | (names.str.strip_chars() == "")
    if empty.any():
        at = row + row_of_entry(lists, int(empty.arg_max() or 0))
        raise fault(file, series.name, at, "the name of a set is missing or empty")
    return lists.rename(series.name)


def holds_names(dtype: pl.DataType) -> bool:
    """Whether a column of this type can hold names and nothing else: lists of text, or empty ones."""
    names = (pl.String, pl.Categorical, pl.Enum, pl.Null)
    return isinstance(dtype, pl.List | pl.Array) and dtype.inner in names


def flat_names(lists: pl.Series) -> pl.Series:
    """All names of List(String) without nulls, one after another."""
    return lists.explode(empty_as_null=False) if len(lists) else pl.Series(lists.name, [], pl.String)


def row_of_entry(lists: pl.Series, place: int) -> int:
    """The row whose list holds that entry of `flat_names`."""
    return int(np.searchsorted(np.cumsum(lists.list.len().to_numpy(), dtype=np.int64), place, side="right"))


def add_names(known: set[str], lists: pl.Series, file: Path, row: int = 0) -> int:
    """Add the names in a column of lists to `known`; returns how many memberships they make.

    Raises:
        CatalogError: a name that no set can have, or more names than a version can have.
    """
    memberships = 0
    for part, first in parts(lists, row):
        names = flat_names(part)
        memberships += len(names)
        new = set(names.unique().to_list()) - known
        for name in sorted(new):
            if what := name_fault(name):
                at = first + row_of_entry(part, int((names == name).arg_max() or 0))
                raise fault(file, lists.name, at, what)
        known |= new
        if len(known) > MAX_SETS:
            raise CatalogError(
                f"{file}: column {lists.name!r}: its first {first + len(part):,} rows name {len(known):,} different "
                f"sets, expected at most {MAX_SETS:,}; are these titles or ids?"
            )
    return memberships


def numbered(lists: pl.Series, names: tuple[str, ...], file: Path) -> pl.Series:
    """The numbers, among the sorted `names`, of each row's sets: List(Int32). A number may stand twice in a list."""
    known = pl.Enum(names)
    number = pl.element().cast(known).to_physical().cast(pl.Int32)
    try:
        found = [part.list.eval(number) for part, _ in parts(lists, 0)]
    except pl.exceptions.InvalidOperationError:
        raise CatalogError(f"{file}: column {lists.name!r}: changed while it was read") from None
    return pl.concat(found) if found else pl.Series(lists.name, [], pl.List(pl.Int32))


def parts(lists: pl.Series, row: int) -> Iterator[tuple[pl.Series, int]]:
    """The column in pieces, each with the number of its first row: long lists stay within memory."""
    for start in range(0, len(lists), _ROWS):
        yield lists[start : start + _ROWS], row + start
