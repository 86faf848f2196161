"""Walking an index the slow way, prefix by prefix, for comparisons with plain Python sets."""

from collections.abc import Collection, Iterator

import numpy as np
from trieton.index.static_index import StaticIndex
from trieton.index.static_layout import StaticLayout

Codes = tuple[int, ...]


def children_of(semantic_ids: Collection[Codes]) -> dict[Codes, list[int]]:
    """Every prefix with its next codes in order: the trie, by definition."""
    children: dict[Codes, set[int]] = {(): set()}
    for codes in semantic_ids:
        for level in range(len(codes)):
            children.setdefault(codes[:level], set()).add(codes[level])
    return {prefix: sorted(codes) for prefix, codes in children.items()}


def walk(index: StaticIndex) -> dict[Codes, list[int]]:
    """The same by following the index's spans."""
    children: dict[Codes, list[int]] = {}

    def visit(prefix: Codes, low: int, high: int) -> None:
        level = len(prefix)
        if level == index.num_levels:
            return
        found = children.setdefault(prefix, [])
        for code, span in edges(index, level, low, high):
            found.append(code)
            visit((*prefix, code), *span)

    visit((), int(index.row_ptr[0][0]), int(index.row_ptr[0][1]))
    return children


def edges(index: StaticIndex, level: int, low: int, high: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Edges of the span [low, high) at a level: (code, the span it leads to)."""
    if level < index.head_levels:
        for edge in range(low, high):
            if level + 1 < len(index.row_ptr):
                below = index.row_ptr[level + 1]
                yield int(index.codes[level][edge]), (int(below[edge]), int(below[edge + 1]))
            else:
                yield int(index.codes[level][edge]), (edge, edge + 1)
        return
    row = index.tail[level - index.head_levels]
    start = low
    for leaf in range(low, high):
        if leaf + 1 == high or row[leaf + 1] != row[leaf]:
            yield int(row[leaf]), (start, leaf + 1)
            start = leaf + 1


def accepted(layout: StaticLayout, num_levels: int) -> set[Codes]:
    """All sequences that the published layout accepts: the first levels by its dense tables, the rest by CSR."""
    d, vocab = layout.dense_layers, layout.vocab_size
    live: list[tuple[Codes, int]]
    if d == 0:  # the first token has no table; the state after token t is t + 1
        live = [((int(t),), int(t) + 1 if num_levels > 1 else 0) for t in np.flatnonzero(layout.start_mask)]
    else:
        mask = np.unpackbits(layout.dense_mask, axis=-1, count=vocab, bitorder="little").astype(bool)
        live = [(tuple(map(int, cell)), int(layout.dense_states[tuple(cell)])) for cell in np.argwhere(mask)]
    for _ in range(max(d, 1), num_levels):
        grown = []
        for prefix, state in live:
            row = slice(int(layout.csr_indptr[state]), int(layout.csr_indptr[state + 1]))
            tokens = layout.csr_indices[row].tolist()
            assert tokens == sorted(set(tokens)), f"tokens of state {state} are not ascending"
            grown += [
                ((*prefix, token), int(after)) for token, after in zip(tokens, layout.csr_next_state[row], strict=True)
            ]
        live = grown
    assert all(state == 0 for _, state in live) or d == num_levels
    return {prefix for prefix, _ in live}
