"""Rows of a catalogue sorted by semantic ID: what every engine hands to the build, and the one for rows in memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from trieton_builder.catalogue.keys import KeyLayout
from trieton_builder.indexing.interruptible import interruptible
from trieton_builder.indexing.row_sets import GatheredSets, RowSets


@dataclass(frozen=True)
class SortedChunk:
    """Consecutive rows in (semantic ID, row number) order.

    Attributes:
        keys: int64 [num_keys, n], packed codes.
        ids: item ids, int64 [n] or UTF-8 `S{w}` [n].
        sets: the named sets of the rows.
    """

    keys: np.ndarray
    ids: np.ndarray
    sets: RowSets


class SortedRows(Protocol):
    """A whole catalogue, sorted; it can be read as often as needed."""

    @property
    def layout(self) -> KeyLayout:
        """How the keys hold the codes."""
        ...

    @property
    def has_end(self) -> bool:
        """Whether some semantic ID is shorter than the number of levels."""
        ...

    @property
    def num_rows(self) -> int: ...

    @property
    def id_type(self) -> np.dtype:
        """dtype of the item ids: int64 or `S{w}`."""
        ...

    @property
    def set_names(self) -> tuple[str, ...]:
        """Names of the named sets, sorted."""
        ...

    def chunks(self, size: int) -> Iterator[SortedChunk]:
        """All rows in order, at most `size` at a time."""
        ...

    def by_id(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All (item ids, int64 places in the sorted order) in ascending (id, place) order, `size` at a time."""
        ...

    def locate(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row numbers int64 [n], keys int64 [num_keys, n]) of rows by their place in the sorted order."""
        ...

    def ids_at(self, places: np.ndarray) -> np.ndarray:
        """Item ids of rows by their place in the sorted order."""
        ...

    def without(self, rows: np.ndarray) -> "SortedRows":
        """The same rows but those numbers (sorted int64)."""
        ...


@dataclass
class MemoryRows:
    """Rows in memory, sorted by Polars, or by NumPy at several times the time where a machine has no Polars.

    `keys` is emptied by the sort, to hold everything only once.
    """

    layout: KeyLayout
    has_end: bool
    keys: list[np.ndarray]
    ids: np.ndarray | None  # in the caller's order; None: the row numbers
    sets: RowSets  # in the caller's order
    rows: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._sets = GatheredSets(self.sets)
        num_rows = len(self.keys[0])
        try:
            import polars as pl
        except ImportError:
            # Stable; the last key is the first.
            self.rows = interruptible(lambda: np.lexsort(self.keys[::-1]).astype(row_type(num_rows)))
            self.keys = [key[self.rows] for key in self.keys]
            return
        columns = {f"key{k}": pl.Series(values) for k, values in enumerate(self.keys)}
        self.keys.clear()
        by = list(columns)
        columns["row"] = pl.Series(np.arange(num_rows, dtype=row_type(num_rows)))
        frame = pl.DataFrame(columns)
        columns.clear()
        frame = interruptible(lambda: frame.sort(by, maintain_order=True))
        self.keys = [frame[name].to_numpy() for name in by]
        self.rows = frame["row"].to_numpy()

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def id_type(self) -> np.dtype:
        return np.dtype(np.int64) if self.ids is None else self.ids.dtype

    @property
    def set_names(self) -> tuple[str, ...]:
        return self.sets.names

    def chunks(self, size: int) -> Iterator[SortedChunk]:
        for start in range(0, self.num_rows, size):
            part = slice(start, start + size)
            rows = self.rows[part]
            ids = rows.astype(np.int64) if self.ids is None else self.ids[rows]
            yield SortedChunk(np.stack([key[part] for key in self.keys]), ids, self._sets.take(rows))

    def by_id(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if self.ids is None:  # the ids are the row numbers: unique, and no sort is needed
            places = np.empty_like(self.rows)
            places[self.rows] = np.arange(self.num_rows, dtype=self.rows.dtype)
            ids = np.arange(self.num_rows, dtype=np.int64)
        else:
            unsorted = self.ids[self.rows]
            places = interruptible(lambda: np.argsort(unsorted))
            ids = unsorted[places]
            if (ids[1:] == ids[:-1]).any():  # only then does it matter that the faster sort is not stable
                places = interruptible(lambda: np.argsort(unsorted, kind="stable"))
        for start in range(0, self.num_rows, size):
            yield ids[start : start + size], places[start : start + size]

    def locate(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.rows[places].astype(np.int64), np.stack([key[places] for key in self.keys])

    def ids_at(self, places: np.ndarray) -> np.ndarray:
        rows = self.rows[places]
        return rows.astype(np.int64) if self.ids is None else self.ids[rows]

    def without(self, rows: np.ndarray) -> "MemoryRows":
        keep = ~np.isin(self.rows, rows)
        self.keys = [key[keep] for key in self.keys]
        self.rows = self.rows[keep]
        return self


def number_row(row: int) -> str:
    """How messages call a row of an array; rows of files have another way."""
    return f"row {row}"


def row_type(num_rows: int) -> np.dtype:
    """The smallest of int32 and int64 that numbers so many rows."""
    return np.dtype(np.int32 if num_rows <= np.iinfo(np.int32).max else np.int64)
