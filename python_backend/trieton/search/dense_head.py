"""The first levels of an index as dense tables, for accelerators: a look-up instead of a search for the edge of a code.

The tables of STATIC (Su et al., arXiv 2602.22647) with the numbering of `StaticIndex`: a state is its edge's number.
They are derived when an index is loaded onto a device and never stored.
"""

from dataclasses import dataclass

import numpy as np

from trieton.index.static_index import StaticIndex
from trieton.index.static_layout import level_edges

MEMORY = 64 << 20  # bytes of tables by default: 2048 x 2048 states and their mask fit
MIN_FILL = 1 / 16  # a row with fewer children per column costs more to scan than its edges do


@dataclass(frozen=True, eq=False)
class DenseHead:
    """Dense tables of the first `layers` levels.

    Attributes:
        layers: 0, 1 or 2.
        masks: per layer packed bits uint8, little bit order: [1, ceil(width(0) / 8)], [width(0), ceil(width(1) / 8)];
            row = code of the level before, bit = code.
        states: per layer the edge that a code leads to, -1 where there is none: int32 or int64 [1, width(0)],
            [width(0), width(1)].
    """

    layers: int
    masks: tuple[np.ndarray, ...]
    states: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self.masks, *self.states))


def dense_head(index: StaticIndex, *, memory: int = MEMORY, min_fill: float = MIN_FILL) -> DenseHead:
    """Expand as many of the first two levels as fit into `memory` bytes and are worth it.

    A level is worth it when its states have on average at least `min_fill` of all possible children.
    """
    masks: list[np.ndarray] = []
    states: list[np.ndarray] = []
    spent, rows_before = 0, 1
    parents, codes = level_edges(index)
    for level in range(min(2, index.num_levels)):
        width = index.width(level)
        dtype = np.dtype(np.int32 if len(codes[level]) <= np.iinfo(np.int32).max else np.int64)
        spent += rows_before * (width * dtype.itemsize + (width + 7) // 8)
        opened = len(codes[level - 1]) if level else 1
        if spent > memory or len(codes[level]) < min_fill * opened * width:
            break
        table: np.ndarray = np.full((rows_before, width), -1, dtype)
        row = codes[level - 1][parents[level]].astype(np.int64) if level else parents[level]
        table[row, codes[level]] = np.arange(len(codes[level]))
        states.append(table)
        masks.append(np.packbits(table != -1, axis=1, bitorder="little"))
        rows_before = width
    return DenseHead(len(states), tuple(masks), tuple(states))
