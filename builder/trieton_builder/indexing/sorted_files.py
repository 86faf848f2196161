"""Sorted rows on disk: what an engine that sorts out of core leaves behind, read in chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import polars as pl

from trieton_builder.catalogue.keys import KeyLayout
from trieton_builder.catalogue.set_lists import LISTS
from trieton_builder.files.whole_file import named
from trieton_builder.indexing.row_sets import RowSets
from trieton_builder.indexing.sorted_rows import SortedChunk


class SortEngine(Protocol):
    """An engine that sorts Parquet files into Parquet files, of any size, as sorted parts in order of their names."""

    def sort_rows(self, rows: Path, out: Path, columns: list[str], by: list[str], without: Path | None) -> None:
        """Sort the files of folder `rows` into the new folder `out`, but for the row numbers listed in `without`."""
        ...

    def sort_ids(self, parts: list[tuple[Path, int]], out: Path) -> None:
        """From sorted parts, each with the place of its first row: columns (id, place) in that order, into `out`."""
        ...


@dataclass
class SortedFiles:
    """A catalogue that an engine has sorted; implements `SortedRows`.

    Attributes:
        layout: how the keys hold the codes.
        has_end: whether some semantic ID is short.
        id_type: int64 or `S{w}`.
        set_names: named sets, sorted.
        set_columns: numbers of the sets that are columns of booleans, `set{number}`.
        has_lists: whether there is a column `sets` of lists of set numbers.
        has_ids: whether items have ids of their own; else their row numbers are their ids.
        engine: sorts.
        folder: where it works.
    """

    layout: KeyLayout
    has_end: bool
    id_type: np.dtype
    set_names: tuple[str, ...]
    set_columns: tuple[int, ...]
    has_lists: bool
    has_ids: bool
    engine: SortEngine
    folder: Path
    num_rows: int = 0
    _dropped: int = 0

    def sort(self, rows: Path, without: np.ndarray | None = None) -> "SortedFiles":
        """Sort the checked rows in folder `rows`; returns self."""
        keys = [f"key{k}" for k in range(self.layout.num_keys)]
        sets = [f"set{number}" for number in self.set_columns] + ([LISTS] if self.has_lists else [])
        columns = [*keys, "row", *(["id"] if self.has_ids else []), *sets]
        listed = None
        self._rows = rows
        with named(self.folder.parent):
            if without is not None:
                self._dropped += 1
                listed = self.folder / f"without-{self._dropped}.parquet"
                pl.DataFrame({"row": without}).write_parquet(listed)
            out = self.folder / f"sorted-{self._dropped}"
            self.engine.sort_rows(rows, out, columns, [*keys, "row"], listed)
        self._parts: list[tuple[Path, int]] = []  # each with the place of its first row
        first = 0
        for part in sorted(out.rglob("*.parquet")):
            self._parts.append((part, first))
            first += pl.scan_parquet(part, glob=False).select(pl.len()).collect().item()
        self.num_rows = first
        self._by_id: Path | None = None
        return self

    def chunks(self, size: int) -> Iterator[SortedChunk]:
        keys = [f"key{k}" for k in range(self.layout.num_keys)]
        for frame in self._frames([part for part, _ in self._parts], size):
            sets = row_sets(frame, self.set_names)
            yield SortedChunk(np.stack([frame[k].to_numpy() for k in keys]), self._ids(frame), sets)

    def by_id(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if self._by_id is None:
            self._by_id = self.folder / f"by-id-{self._dropped}"
            with named(self.folder.parent):
                self.engine.sort_ids(self._parts, self._by_id)
        for frame in self._frames(sorted(self._by_id.rglob("*.parquet")), size):
            yield self._ids(frame), frame["place"].to_numpy()

    def locate(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        frame = self._at(places)
        keys = [frame[f"key{k}"].to_numpy() for k in range(self.layout.num_keys)]
        return frame["row"].to_numpy(), np.stack(keys)

    def ids_at(self, places: np.ndarray) -> np.ndarray:
        return self._ids(self._at(places))

    def without(self, rows: np.ndarray) -> "SortedFiles":
        return self.sort(self._rows, rows)

    def _at(self, places: np.ndarray) -> pl.DataFrame:
        """Rows at `places`, in that order."""
        found = []
        for part, first in self._parts:
            inside = pl.col("place").is_in(pl.Series(np.unique(places)).implode())
            scan = pl.scan_parquet(part, glob=False, row_index_name="place", row_index_offset=first)
            found.append(scan.with_columns(pl.col("place").cast(pl.Int64)).filter(inside).collect())
        wanted = pl.DataFrame({"place": np.asarray(places, np.int64)})
        return wanted.join(pl.concat(found), on="place", how="left", maintain_order="left")

    def _ids(self, frame: pl.DataFrame) -> np.ndarray:
        column = frame["id" if "id" in frame.columns else "row"]
        if self.id_type.kind == "S":
            return np.array([text.encode() for text in column.to_list()], self.id_type)
        return column.to_numpy()

    def _frames(self, parts: list[Path], size: int) -> Iterator[pl.DataFrame]:
        for part in parts:
            for batch in pl.scan_parquet(part, glob=False).collect_batches(chunk_size=size, maintain_order=True):
                for start in range(0, len(batch), size):
                    yield batch[start : start + size]


def row_sets(frame: pl.DataFrame, names: tuple[str, ...]) -> RowSets:
    """The sets of a table of checked rows, see `InputBatch`."""
    masks = {number: frame[f"set{number}"].to_numpy() for number in _set_columns(frame, names)}
    if LISTS not in frame.columns:
        return RowSets(names, masks)
    lists = frame[LISTS]
    numbers = lists.explode(empty_as_null=False).cast(pl.Int32).to_numpy()
    return RowSets(names, masks, lists.list.len().to_numpy(), numbers)


def _set_columns(frame: pl.DataFrame, names: tuple[str, ...]) -> list[int]:
    there = set(frame.columns)
    return [number for number in range(len(names)) if f"set{number}" in there]
