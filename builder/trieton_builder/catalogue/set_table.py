"""Named sets from a table: a column of item ids beside boolean columns, or a column of lists of set names."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from trieton.index.catalog import Catalog
from trieton.index.named_sets import NamedSets, positions_type, stored_as_bits
from trieton.index.static_index import StaticIndex

from trieton_builder.catalogue.columns import FALSE, TRUE, as_booleans, fault, may_be_set
from trieton_builder.catalogue.set_lists import as_lists, holds_names
from trieton_builder.catalogue.tables import read_table

SEPARATOR = "|"  # between set names in text


@dataclass(frozen=True)
class SetTable:
    """What a table says about the items of one version.

    Attributes:
        sets: its named sets.
        num_rows: rows of the table.
        num_unknown: rows whose item the version does not have; they count for nothing.
        num_missing: items of the version that the table does not have; they are in none of its sets.
    """

    sets: NamedSets
    num_rows: int
    num_unknown: int
    num_missing: int


def read_set_table(path: str | Path, index: StaticIndex, *, id_column: str = "item_id") -> SetTable:
    """Read named sets for the items of `index` from a table, as `trieton build` reads them: a file, folder or pattern.

    Beside `id_column` a column is either one set (booleans, or 0 and 1) under the column's name, or holds the names of
    each item's sets: a list of strings, or text with `|` between them. No list and an empty text mean no set.

    Raises:
        ValueError: names the file, column and row of the first thing that is wrong: an unreadable file, no id column,
            ids of the wrong kind, an item that stands twice, a missing value, a column that is no set, a name twice.
    """
    path = Path(path)
    frame = _read(path, id_column, text_ids=index.catalog.is_text)
    row_of = _rows_by_position(path, frame[id_column], index.catalog)
    stored: dict[str, np.ndarray] = {}
    for column in frame.columns:
        if column == id_column:
            continue
        values = _checked_column(path, frame[column])
        found = _named_in_lists(values, row_of) if values.dtype == pl.List(pl.String) else _one(values, row_of)
        for name, held in found.items():
            if name in stored:
                raise ValueError(f"{path}: set {name!r} stands in two columns, the second is {column!r}")
            stored[name] = held
    num_missing = int((row_of < 0).sum())
    num_known = index.num_items - num_missing
    sets = NamedSets(index.num_items, dict(sorted(stored.items())))
    return SetTable(sets, len(frame), len(frame) - num_known, num_missing)


def _read(path: Path, id_column: str, *, text_ids: bool) -> pl.DataFrame:
    table = read_table(path)
    frame = table.frame
    if id_column not in frame.columns:
        raise ValueError(f"{path}: expected a column {id_column!r} of item ids, got {frame.columns}")
    if len(frame.columns) == 1:
        raise ValueError(f"{path}: expected columns of sets beside {id_column!r}, got none")
    for place, name in enumerate(frame.columns):
        if not name.strip():
            raise ValueError(f"{path}: column {name!r} (number {place}): a set needs a name")
    if id_column in table.untyped:
        frame = frame.with_columns(table.item_ids(id_column, text=text_ids))
    return frame


def _rows_by_position(path: Path, ids: pl.Series, catalog: Catalog) -> np.ndarray:
    """Row int64 of each item position, -1 where the table has no row for it."""
    _refuse_nulls(path, ids)
    if catalog.is_text != (ids.dtype == pl.String) or not (catalog.is_text or ids.dtype.is_integer()):
        kind = "text" if catalog.is_text else "integers"
        raise ValueError(f"{path}: column {ids.name!r}: the item ids of this version are {kind}, got {ids.dtype}")
    rows = np.arange(len(ids))
    if catalog.is_text:
        positions = catalog.positions(ids.to_numpy())
    else:
        # In ascending order the look-ups of a whole catalogue walk through memory instead of jumping about in it.
        values = ids.to_numpy()
        rows = np.argsort(values)
        positions = catalog.positions(values[rows])
    known = positions >= 0
    rows, positions = rows[known], positions[known]
    row_of = np.full(catalog.num_items, -1, np.int64)
    row_of[positions] = rows
    repeated = np.flatnonzero(row_of[positions] != rows)
    if repeated.size:
        first, second = sorted((int(rows[repeated[0]]), int(row_of[positions[repeated[0]]])))
        raise ValueError(f"{path}: item {ids[first]!r} stands in rows {first} and {second}; expected one row per item")
    return row_of


def _checked_column(path: Path, values: pl.Series) -> pl.Series:
    """The column as Boolean or List(String)."""
    if holds_names(values.dtype) or (values.dtype == pl.String and not values.is_in([*TRUE, *FALSE]).any()):
        return as_lists(values, SEPARATOR, path)
    if not may_be_set(values.dtype):
        raise ValueError(
            f"{path}: column {values.name!r}: expected booleans, 0 and 1, or lists of set names, got {values.dtype}"
        )
    return as_booleans(values, path)


def _refuse_nulls(path: Path, values: pl.Series) -> None:
    if values.null_count():
        raise fault(path, values.name, int(values.is_null().arg_max() or 0), "the value is missing")


def _one(values: pl.Series, row_of: np.ndarray) -> dict[str, np.ndarray]:
    mask = values.to_numpy()[row_of] & (row_of >= 0) if len(values) else np.zeros(len(row_of), np.bool_)
    return dict(NamedSets.from_masks({values.name: mask}, len(row_of)).stored)


def _named_in_lists(values: pl.Series, row_of: np.ndarray) -> dict[str, np.ndarray]:
    """The sets of a column of lists of names; a name twice in one list counts once."""
    num_items = len(row_of)
    positions = np.flatnonzero(row_of >= 0)
    lists = values.gather(row_of[positions])
    members = np.repeat(positions, lists.list.len().to_numpy())
    names = lists.filter(lists.list.len() > 0).explode()
    # Members ascend, and a stable sort by name leaves them so inside each name. Small numbers in place of names: for
    # 16 bits numpy's stable sort is a radix sort.
    numbers = names.cast(pl.Categorical).to_physical().to_numpy()
    numbers = numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order].astype(np.int64), prepend=-1))
    found = {}
    for start, end in zip(starts, np.append(starts[1:], len(order)), strict=True):
        held = members[order[start:end]]
        held = held[np.diff(held, prepend=-1) > 0]
        if stored_as_bits(len(held), num_items):
            mask = np.zeros(num_items, np.bool_)
            mask[held] = True
            packed = np.packbits(mask, bitorder="little")
        else:
            packed = held.astype(positions_type(num_items))
        found[str(names[int(order[start])])] = packed
    return found
