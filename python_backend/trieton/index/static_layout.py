"""The layout of STATIC as published (Su et al., arXiv 2602.22647), derived from a `StaticIndex`.

For checks against other implementations, and for accelerator kernels that were written for it. States have the numbers
of the published builder: 0 is the end, 1 + t is the state after a first token t, and deeper states follow level by
level from V + 1 on, in lexicographic order.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trieton.index.static_index import StaticIndex

INT32_MAX = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, eq=False)
class StaticLayout:
    """A trie as dense tables for the first levels and one CSR matrix for all levels after the first.

    Attributes:
        vocab_size: V, one token range for all levels: the widest level, end code included.
        dense_layers: d, levels that the dense tables answer.
        start_mask: bool [V], first tokens.
        dense_mask: packed bits uint8, little bit order: shape [V] * (d - 1) + [ceil(V / 8)]; empty for d = 0.
        dense_states: integer [V] * d, the state after d tokens; 0 where there is none. Empty for d = 0.
        csr_indptr: integer [num_states + 1], first edge of each state.
        csr_indices: int32 [edges], token of each edge, ascending within a state.
        csr_next_state: integer [edges], the state each edge leads to; 0 after the last level.
    """

    vocab_size: int
    dense_layers: int
    start_mask: np.ndarray
    dense_mask: np.ndarray
    dense_states: np.ndarray
    csr_indptr: np.ndarray
    csr_indices: np.ndarray
    csr_next_state: np.ndarray


def to_static(index: "StaticIndex", dense_layers: int) -> StaticLayout:
    """Expand `index` into the published layout.

    Args:
        dense_layers: 0, 1 or 2, and below the number of levels where it is not 0. Dense tables take V ** d * 4 bytes.

    Raises:
        ValueError: another number of dense layers.
    """
    levels = index.num_levels
    if dense_layers not in (0, 1, 2) or (dense_layers and dense_layers >= levels):
        raise ValueError(f"dense_layers: expected 0 to {min(2, levels - 1)} for {levels} levels, got {dense_layers}")
    vocab = max(index.width(level) for level in range(levels))
    parents, codes = level_edges(index)
    # First state number of each level's edges; level 0 is spread over the whole vocabulary.
    first = [1, vocab + 1]
    for level in range(1, levels - 1):
        first.append(first[-1] + len(codes[level]))
    num_states = vocab + 1 + sum(len(codes[level]) for level in range(1, levels - 1))
    num_edges = sum(len(c) for c in codes[1:])
    wide = np.dtype(np.int32 if max(num_states, num_edges) <= INT32_MAX else np.int64)

    def states(level: int) -> np.ndarray:
        if level == levels - 1:
            return np.zeros(len(codes[level]), np.int64)
        return codes[level] + np.int64(1) if level == 0 else np.arange(len(codes[level])) + first[level]

    counts = np.zeros(num_states, np.int64)
    for level in range(1, levels):
        opened = np.bincount(parents[level], minlength=len(codes[level - 1]))
        counts[states(level - 1)] = opened
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    start_mask = np.zeros(vocab, np.bool_)
    start_mask[codes[0]] = True
    dense_mask, dense_states = np.zeros(0, np.uint8), np.zeros(0, wide)
    if dense_layers:
        cells: tuple[np.ndarray, ...] = (codes[0].astype(np.int64),)
        if dense_layers == 2:
            cells = (codes[0][parents[1]].astype(np.int64), codes[1].astype(np.int64))
        mask = np.zeros((vocab,) * dense_layers, np.bool_)
        mask[cells] = True
        dense_mask = np.packbits(mask, axis=-1, bitorder="little")
        dense_states = np.zeros(mask.shape, wide)
        dense_states[cells] = states(dense_layers - 1)
    return StaticLayout(
        vocab_size=vocab,
        dense_layers=dense_layers,
        start_mask=start_mask,
        dense_mask=dense_mask,
        dense_states=dense_states,
        csr_indptr=indptr.astype(wide),
        csr_indices=np.concatenate([np.zeros(0, np.int32), *(c.astype(np.int32) for c in codes[1:])]),
        csr_next_state=np.concatenate([np.zeros(0, wide), *(states(level).astype(wide) for level in range(1, levels))]),
    )


def level_edges(index: "StaticIndex") -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Every level's edges in lexicographic order, the tail's too: (number of the parent edge, code) per level.

    The parents of level 0 are all 0, the root.
    """
    parents: list[np.ndarray] = []
    codes: list[np.ndarray] = []
    for level in range(index.head_levels):
        parents.append(np.repeat(np.arange(len(index.row_ptr[level]) - 1), np.diff(index.row_ptr[level])))
        codes.append(index.codes[level])
    if index.head_levels < index.num_levels:
        opens = np.zeros(index.num_leaves + 1, np.bool_)
        opens[index.row_ptr[index.head_levels]] = True  # first leaf of each state before the tail
        opens = opens[:-1]
        for row in index.tail:
            edge = opens.copy()
            edge[1:] |= row[1:] != row[:-1]
            parents.append((np.cumsum(opens) - 1)[edge])
            codes.append(row[edge])
            opens = edge
    return parents, codes
