"""A compiled constraint: which edges of the trie have an allowed item below them."""

from dataclasses import dataclass
from weakref import ref

import numpy as np

from trieton.index.static_index import StaticIndex


@dataclass(frozen=True, eq=False)
class Plane:
    """One request's allowed edges, per plane level, and its allowed items.

    Plane levels are the head levels of the index (over edges) and, where the index has a tail, one more over leaves;
    trie level l reads plane level `min(l, head_levels)`. In the tail an edge is a run of leaves and is alive when any
    leaf of the run is.

    An edge e of plane level p is alive when

        e is in alive[p]                               where `alive` is given (then nothing else counts)
        bit e of bits[p] is set and e not in dead[p]   otherwise; bits[p] None means every bit is set

    Attributes:
        bits: packed bits uint8 [ceil(edges / 8)], little bit order, or None, per plane level.
        dead: int64, sorted, per plane level; None when nothing is excluded.
        alive: int64, sorted, per plane level; None unless an include list (or a very small set) made it.
        item_bits: packed allowed items uint8 [ceil(num_items / 8)], or None for all.
        excluded: int64, sorted positions of excluded items.
        included: int64, sorted positions of the only allowed items, already reduced by everything else; None for all.
        num_unknown: distinct ids of the include list that the version does not have; they were ignored.
        index: the index that it was compiled for, and holds for; None for a plane made by hand.
    """

    bits: tuple[np.ndarray | None, ...]
    dead: tuple[np.ndarray, ...] | None = None
    alive: tuple[np.ndarray, ...] | None = None
    item_bits: np.ndarray | None = None
    excluded: np.ndarray | None = None
    included: np.ndarray | None = None
    num_unknown: int = 0
    index: "ref[StaticIndex] | None" = None

    @property
    def nbytes(self) -> int:
        """Bytes held; what two fields share counts once."""
        fields = (*self.bits, *(self.dead or ()), *(self.alive or ()), self.item_bits, self.excluded, self.included)
        return sum({id(a): a.nbytes for a in fields if a is not None}.values())

    def allows(self, positions: np.ndarray) -> np.ndarray:
        """bool per item position: whether the request may be given that item."""
        positions = np.asarray(positions, np.int64)
        if self.included is not None:
            return _contains(self.included, positions)
        ok = np.ones(len(positions), np.bool_)
        if self.item_bits is not None:
            ok &= (self.item_bits[positions >> 3] >> (positions & 7) & 1).astype(np.bool_)
        if self.excluded is not None:
            ok &= ~_contains(self.excluded, positions)
        return ok


def _contains(ascending: np.ndarray, values: np.ndarray) -> np.ndarray:
    if not len(ascending):
        return np.zeros(len(values), np.bool_)
    place = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return ascending[place] == values
