"""Small random catalogues with named sets, and constraints over them whose meaning is plain to see."""

from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import numpy as np
from hypothesis import strategies as st
from trieton.index.static_index import StaticIndex
from trieton_builder.indexing import trie
from trieton_builder.indexing.trie import build_index


@dataclass
class Shop:
    """A small catalogue and the plain facts about it."""

    index: StaticIndex
    ids: list
    codes: list[tuple[int, ...]]  # with the end code where a semantic ID is short
    masks: dict[str, np.ndarray]


@st.composite
def shops(draw: Callable) -> Shop:
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    num_levels = draw(st.integers(1, 4))
    sizes = tuple(draw(st.integers(1, 6)) for _ in range(num_levels))
    num_items = draw(st.integers(1, 120))
    codes = rng.integers(0, sizes, (num_items, num_levels))
    lengths = rng.integers(1, num_levels + 1, num_items) if draw(st.booleans()) else None
    ids = rng.permutation(10 * num_items)[:num_items]
    text = draw(st.booleans())
    item_ids = [f"item-{i}" for i in ids] if text else ids.tolist()
    masks = {name: rng.random(num_items) < share for name, share in (("a", 0.5), ("b", 0.25), ("rare", 0.03))}
    with mock.patch.object(
        trie, "MAX_TAIL_SPAN", draw(st.sampled_from([0, 1, 5, 128]))
    ):  # every split of head and tail
        index = build_index(codes, codebook_sizes=sizes, item_ids=item_ids, sets=masks, lengths=lengths)
    rows = [
        tuple(int(c) if lengths is None or level < lengths[i] else sizes[level] for level, c in enumerate(row))
        for i, row in enumerate(codes)
    ]
    return Shop(index, item_ids, rows, masks)


TREES = st.recursive(
    st.sampled_from(["a", "b", "rare"]),
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3)),
    ),
    max_leaves=8,
)


def text_of(tree) -> str:
    if isinstance(tree, str):
        return tree
    if tree[0] == "not":
        return f"not ({text_of(tree[1])})"
    return f" {tree[0]} ".join(f"({text_of(part)})" for part in tree[1])


def holds(tree, masks: dict[str, np.ndarray], item: int) -> bool:
    if isinstance(tree, str):
        return bool(masks[tree][item])
    if tree[0] == "not":
        return not holds(tree[1], masks, item)
    return (all if tree[0] == "and" else any)(holds(part, masks, item) for part in tree[1])
