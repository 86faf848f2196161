"""Named sets from a table: a column of item ids beside boolean columns, or a column of lists of set names."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from trieton.index.catalog import Catalog
from trieton.index.named_sets import NamedSets, check_set_names, name_fault, positions_type, stored_as_bits
from trieton.index.static_index import StaticIndex

from trieton_builder.catalogue.columns import FALSE, TRUE, as_booleans, fault, may_be_set
from trieton_builder.catalogue.set_lists import add_names, as_lists, holds_names, numbered
from trieton_builder.catalogue.tables import read_table

SHOWN_IDS = 5  # of items that only one side knows


@dataclass(frozen=True)
class SetTable:
    """What a table says about the items of one version.

    Attributes:
        sets: its named sets.
        num_rows: rows of the table.
        num_unknown: rows whose item the version does not have; they count for nothing.
        num_missing: items of the version that the table does not have; they are in none of its sets.
        unknown_ids, missing_ids: the first few of those.
        empty_columns: columns of lists in which no item of the version has a set.
    """

    sets: NamedSets
    num_rows: int
    num_unknown: int
    num_missing: int
    unknown_ids: tuple[int | str, ...] = ()
    missing_ids: tuple[int | str, ...] = ()
    empty_columns: tuple[str, ...] = ()


def read_set_table(
    path: str | Path,
    index: StaticIndex,
    *,
    id_column: str = "item_id",
    set_names: Collection[str] = (),
    set_separator: str = "|",
) -> SetTable:
    """Read named sets for the items of `index` from a table, as `trieton build` reads them: a file, folder or pattern.

    Beside `id_column` a column is either one set (booleans, or 0 and 1) under the column's name, or holds the names of
    each item's sets: a list of strings, or text where `set_names` declares it. No list and an empty text mean no set.

    Args:
        set_names: columns of text that hold names of sets. Without this, text has to say true or false: `yes` and `no`
            in a column `in_stock` are no sets.
        set_separator: between names in text.

    Raises:
        ValueError: names the file, column and row of the first thing that is wrong: an unreadable file, no row, no id
            column, ids of the wrong kind, an item that stands twice, a missing value, a column that is no set, a name
            that no set can have, a name twice, more sets than a version can have, no set at all.
    """
    path = Path(path)
    frame = _read(path, id_column, set_names, text_ids=index.catalog.is_text)
    row_of = _rows_by_position(path, frame[id_column], index.catalog)
    stored: dict[str, np.ndarray] = {}
    empty = []
    for column in frame.columns:
        if column == id_column:
            continue
        values = frame[column]
        if column in set_names or holds_names(values.dtype):
            found = _named_in_lists(as_lists(values, set_separator, path), row_of, path)
            empty += [] if found else [column]
        else:
            found = _one(_booleans(path, values), row_of)
        for name, held in found.items():
            if name in stored:
                raise ValueError(f"{path}: set {name!r} stands in two columns, the second is {column!r}")
            stored[name] = held
    if not stored:
        raise ValueError(
            f"{path}: no item of this version is in any set of the columns {', '.join(map(repr, empty))}; "
            "expected at least one set (a column of 0 and 1 may be an empty one)"
        )
    try:
        check_set_names(stored)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    missing = np.flatnonzero(row_of < 0)
    known = np.zeros(len(frame), np.bool_)
    known[row_of[row_of >= 0]] = True
    unknown = np.flatnonzero(~known)
    return SetTable(
        NamedSets(index.num_items, dict(sorted(stored.items()))),
        len(frame),
        len(unknown),
        len(missing),
        tuple(frame[id_column].gather(unknown[:SHOWN_IDS]).to_list()),
        tuple(_shown(item) for item in index.catalog.ids(missing[:SHOWN_IDS]).tolist()),
        tuple(empty),
    )


def _shown(item: int | str | bytes) -> int | str:
    return item.decode() if isinstance(item, bytes) else item


def _read(path: Path, id_column: str, set_names: Collection[str], *, text_ids: bool) -> pl.DataFrame:
    table = read_table(path)
    frame = table.frame
    if id_column not in frame.columns:
        raise ValueError(f"{path}: expected a column {id_column!r} of item ids, got {frame.columns}")
    if len(frame.columns) == 1:
        raise ValueError(f"{path}: expected columns of sets beside {id_column!r}, got none")
    for name in set_names:
        if name not in frame.columns or name == id_column:
            raise ValueError(f"{path}: column {name!r}: expected a column of set names, got {frame.columns}")
    if not len(frame):
        raise ValueError(f"{path}: has a header and no rows; expected a row per item")
    for place, name in enumerate(frame.columns):
        if name != id_column and name not in set_names and (what := name_fault(name)):
            raise ValueError(f"{path}: column {name!r} (number {place}): {what}")
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


def _booleans(path: Path, values: pl.Series) -> pl.Series:
    """The column as Boolean."""
    if not may_be_set(values.dtype):
        raise ValueError(
            f"{path}: column {values.name!r}: expected booleans, 0 and 1, or lists of set names, got {values.dtype}"
        )
    if values.dtype in (pl.String, pl.Categorical, pl.Enum):
        values = values.cast(pl.String)
        other = ~values.is_in([*TRUE, *FALSE]).fill_null(True)
        if other.any():
            row = int(other.arg_max() or 0)
            what = f"expected true or false, or 0 and 1, got {values[row][:80]!r}"
            raise fault(path, values.name, row, f"{what}; names of sets have to be declared: --set-names {values.name}")
    return as_booleans(values, path)


def _refuse_nulls(path: Path, values: pl.Series) -> None:
    if values.null_count():
        raise fault(path, values.name, int(values.is_null().arg_max() or 0), "the value is missing")


def _one(values: pl.Series, row_of: np.ndarray) -> dict[str, np.ndarray]:
    mask = values.to_numpy()[row_of] & (row_of >= 0) if len(values) else np.zeros(len(row_of), np.bool_)
    return dict(NamedSets.from_masks({values.name: mask}, len(row_of)).stored)


def _named_in_lists(lists: pl.Series, row_of: np.ndarray, path: Path) -> dict[str, np.ndarray]:
    """The sets of a column of lists of names; a name twice in one list counts once."""
    num_items = len(row_of)
    known: set[str] = set()
    add_names(known, lists, path)
    names = tuple(sorted(known))
    positions = np.flatnonzero(row_of >= 0)
    lists = numbered(lists.gather(row_of[positions]), names, path)
    members = np.repeat(positions, lists.list.len().to_numpy())
    numbers = lists.explode(empty_as_null=False).to_numpy()
    # Members ascend, and a stable sort by number leaves them so inside each set. For 16 bits numpy's stable sort is a
    # radix sort.
    numbers = numbers.astype(np.min_scalar_type(max(len(names) - 1, 0)))
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order].astype(np.int64), prepend=-1))
    found = {}
    for start, end in zip(starts, [*starts[1:], len(order)][: len(starts)], strict=True):
        held = members[order[start:end]]
        held = held[np.diff(held, prepend=-1) > 0]
        if stored_as_bits(len(held), num_items):
            mask = np.zeros(num_items, np.bool_)
            mask[held] = True
            packed = np.packbits(mask, bitorder="little")
        else:
            packed = held.astype(positions_type(num_items))
        found[names[numbers[order[start]]]] = packed
    return found
