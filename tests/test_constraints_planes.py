"""Planes against enumeration: on every plane level exactly the edges with an allowed item below them are alive."""

from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trieton import constraints
from trieton.constraints import ConstraintError, compile_constraint
from trieton.index import StaticIndex
from trieton.plane import Plane
from trieton_builder import trie
from trieton_builder.trie import build_index


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


def alive_edges(plane: Plane, level: int, count: int) -> list[int]:
    """What a kernel reads off a plane, spelled out."""
    if plane.alive is not None:
        return plane.alive[level].tolist()
    bits = plane.bits[level]
    alive = np.ones(count, bool) if bits is None else np.unpackbits(bits, bitorder="little", count=count).astype(bool)
    if plane.dead is not None:
        alive[plane.dead[level]] = False
    return np.flatnonzero(alive).tolist()


def check(shop: Shop, plane: Plane, allowed: list[bool]) -> None:
    index = shop.index
    distinct = sorted(set(shop.codes))
    by_position = index.catalog.positions(shop.ids)
    allows = np.zeros(index.num_items, bool)
    allows[by_position] = allowed
    np.testing.assert_array_equal(plane.allows(np.arange(index.num_items)), allows)
    for level in range(len(plane.bits)):
        # The last plane level is over leaves: an edge there is a whole semantic ID.
        depth = index.num_levels if level == len(plane.bits) - 1 else level + 1
        prefixes = sorted({codes[:depth] for codes in distinct})
        number = {prefix: edge for edge, prefix in enumerate(prefixes)}
        want = sorted({number[codes[:depth]] for codes, ok in zip(shop.codes, allowed, strict=True) if ok})
        assert alive_edges(plane, level, len(prefixes)) == want, f"plane level {level}"
        assert plane.bits[level] is None or plane.bits[level].nbytes == (len(prefixes) + 7) // 8


@settings(deadline=None, max_examples=150)
@given(
    shop=shops(), tree=st.none() | TREES, seed=st.integers(0, 1000), listed=st.sampled_from([0, 1, 64]), data=st.data()
)
def test_every_plane_is_exactly_the_allowed_items_carried_up(shop, tree, seed, listed, data):
    rng = np.random.default_rng(seed)
    unknown = ["nothing"] if shop.index.catalog.is_text else [-7, 10**12]

    def some_ids():
        share = data.draw(st.sampled_from([0.02, 0.3, 0.9, 1.0]))
        chosen = [i for i in shop.ids if rng.random() < share]
        return chosen + chosen[:3] + unknown

    include = some_ids() if data.draw(st.booleans()) else None
    exclude = some_ids() if data.draw(st.booleans()) else None
    with mock.patch.object(constraints, "LISTED_EDGE_BITS", listed):
        plane = compile_constraint(shop.index, tree and text_of(tree), include=include, exclude=exclude)
    allowed = [
        (tree is None or holds(tree, shop.masks, i))
        and (include is None or item in include)
        and (exclude is None or item not in exclude)
        for i, item in enumerate(shop.ids)
    ]
    check(shop, plane, allowed)
    assert plane.num_unknown == (0 if include is None else len(unknown))


def test_lists_of_the_wrong_kind_are_refused_by_name():
    index = build_index(np.array([[0], [1]]), codebook_sizes=(2,), item_ids=[5, 6])
    with pytest.raises(ConstraintError, match=r"exclude: .*expected integers"):
        compile_constraint(index, exclude=["a"])
    with pytest.raises(ConstraintError, match=r"include: .*flat list"):
        compile_constraint(index, include=[[5]])
