"""Which named sets the rows of a catalogue are in, at a cost that follows the memberships, not rows x sets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from trieton.compiled import cached_njit


@dataclass(frozen=True)
class RowSets:
    """Sets of some rows, each set by its number among the sorted names.

    Attributes:
        names: names of the sets, sorted.
        masks: for sets that came as columns of their own, {number: bool [n]}.
        lengths: of each row's list, integers [n]; None where no set came in lists.
        numbers: all lists one after another, int32. A number may stand twice in one list.
    """

    names: tuple[str, ...] = ()
    masks: Mapping[int, np.ndarray] = field(default_factory=dict)
    lengths: np.ndarray | None = None
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @classmethod
    def of_masks(cls, masks: Mapping[str, np.ndarray]) -> "RowSets":
        """From a mask per name."""
        names = tuple(sorted(masks))
        return cls(names, {number: masks[name] for number, name in enumerate(names)})

    def members(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number, ascending rows) of each set that has a row here."""
        for number, mask in self.masks.items():
            rows = np.flatnonzero(mask)
            if len(rows):
                yield number, rows
        if self.lengths is not None:
            starts, rows = _grouped(self.lengths, self.numbers, len(self.names))
            for number in np.flatnonzero(np.diff(starts)).tolist():
                yield number, rows[starts[number] : starts[number + 1]]


class GatheredSets:
    """The sets of rows in memory, from which those of any rows can be taken."""

    def __init__(self, sets: RowSets):
        self._sets = sets
        self.names: Sequence[str] = sets.names
        self._ends = None if sets.lengths is None else np.cumsum(sets.lengths, dtype=np.int64)

    def take(self, rows: np.ndarray) -> RowSets:
        """The sets of `rows`, in that order."""
        held = self._sets
        masks = {number: mask[rows] for number, mask in held.masks.items()}
        if held.lengths is None or self._ends is None:
            return RowSets(held.names, masks)
        lengths = held.lengths[rows].astype(np.int64)
        ends = np.cumsum(lengths)
        # Entry i of a row's list lies i behind the list's start, there as here.
        shift = np.repeat(self._ends[rows] - ends, lengths)
        return RowSets(held.names, masks, lengths, held.numbers[np.arange(len(shift)) + shift])


@cached_njit(nogil=True)
def _grouped(lengths, numbers, num_sets):
    """Rows by set: (starts int64 [num_sets + 1], rows int32); a set twice in one list counts once."""
    starts = np.zeros(num_sets + 1, np.int64)
    newest = np.full(num_sets, -1, np.int64)  # the last row that a set was seen in
    place = 0
    for row in range(len(lengths)):
        for _ in range(lengths[row]):
            number = numbers[place]
            place += 1
            if newest[number] != row:
                newest[number] = row
                starts[number + 1] += 1
    for number in range(num_sets):
        starts[number + 1] += starts[number]
    filled = starts[:-1].copy()
    newest[:] = -1
    rows = np.empty(starts[-1], np.int32)
    place = 0
    for row in range(len(lengths)):
        for _ in range(lengths[row]):
            number = numbers[place]
            place += 1
            if newest[number] != row:
                newest[number] = row
                rows[filled[number]] = row
                filled[number] += 1
    return starts, rows
