"""Planes against enumeration: on every plane level exactly the edges with an allowed item below them are alive."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shops import TREES, Shop, holds, shops, text_of
from trieton.constraint import compile as constraints
from trieton.constraint.compile import ConstraintError, compile_constraint
from trieton.constraint.plane import Plane
from trieton_builder.indexing.trie import build_index


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


def test_an_empty_catalogue_has_planes_that_allow_nothing():
    index = build_index(np.zeros((0, 3), int), codebook_sizes=(4, 4, 4), sets={"a": np.zeros(0, bool)})
    for plane in (
        compile_constraint(index, "a"),
        compile_constraint(index, "not a", include=[1], exclude=[2]),
        compile_constraint(index, exclude=[2]),
    ):
        assert len(plane.bits) == len(compile_constraint(index).bits)
        assert plane.allows(np.zeros(0, int)).tolist() == []
