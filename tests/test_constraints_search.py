"""Searches under constraints against: filter the whole catalogue, then search what is left by brute force."""

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shops import TREES, Shop, holds, shops, text_of
from trieton.constraint.compile import compile_constraint
from trieton.index.static_index import StaticIndex
from trieton.search.beam import BeamResult, beam_search
from trieton_builder.indexing.trie import build_index

KERNELS = ["torch", "cpu"]
SIZES = (8, 8, 8)


class Model:
    """A toy model over an index whose semantic IDs may end early: behind the end only the end code goes on."""

    def __init__(self, index: StaticIndex, seed: int):
        self.toy = oracle.ToyModel([index.width(level) for level in range(index.num_levels)], seed)
        self.ends = [index.end_code(level) for level in range(index.num_levels)]

    def __call__(self, prefix: oracle.Codes) -> np.ndarray:
        level = len(prefix)
        if level and self.ends[level - 1] >= 0 and prefix[-1] == self.ends[level - 1]:
            logits = np.full(self.toy.sizes[level], -np.inf, np.float32)
            logits[self.ends[level]] = 0
            return logits
        return self.toy(prefix)


def stepper(models: list):
    """`next_logits` for a batch in which every request has a model of its own."""
    prefixes: list[list[oracle.Codes]] = [[()] for _ in models]

    def next_logits(level, codes, parents):
        nonlocal prefixes
        if level:
            codes, parents = np.asarray(codes), np.asarray(parents)
            prefixes = [
                [() if p < 0 else (*prefixes[b][p], int(c)) for c, p in zip(codes[b], parents[b], strict=True)]
                for b in range(len(models))
            ]
        dead = np.zeros(models[0].toy.sizes[level], np.float32)
        rows = [
            [model(p) if len(p) == level else dead for p in beams]
            for model, beams in zip(models, prefixes, strict=True)
        ]
        return np.array(rows)

    return next_logits


def results_of(index: StaticIndex, result: BeamResult, request: int) -> list[tuple[oracle.Codes, np.float32]]:
    """[(codes with the end code filled in, score)]."""
    ends = [index.end_code(level) for level in range(index.num_levels)]
    count = int(result.num_valid[request])
    return [
        (tuple(int(c) if c >= 0 else ends[level] for level, c in enumerate(row)), score)
        for row, score in zip(result.codes[request, :count], result.scores[request, :count], strict=True)
    ]


@settings(deadline=None, max_examples=60)
@given(shop=shops(), kernel=st.sampled_from(KERNELS), data=st.data())
def test_a_mixed_batch_equals_filtering_the_catalogue_first(shop: Shop, kernel: str, data):
    index = shop.index
    batch_size = data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    models = [Model(index, seed) for seed in range(batch_size)]
    widths, planes, allowed = [], [], []
    for _ in range(batch_size):
        tree = data.draw(st.none() | TREES)
        include, exclude = (
            [i for i in shop.ids if rng.random() < share] if share is not None else None
            for share in data.draw(st.tuples(*[st.sampled_from([None, 0.1, 0.5, 0.9])] * 2))
        )
        ok = [
            (tree is None or holds(tree, shop.masks, i))
            and (include is None or item in include)
            and (exclude is None or item not in exclude)
            for i, item in enumerate(shop.ids)
        ]
        widths.append(data.draw(st.integers(1, 30)))
        unconstrained = tree is None and include is None and exclude is None
        planes.append(None if unconstrained else compile_constraint(index, tree and text_of(tree), include, exclude))
        allowed.append(ok)
    result = beam_search(
        stepper(models), index, batch_size=batch_size, beam_width=widths, constraints=planes, kernel=kernel
    )
    for request, (model, plane, ok, width) in enumerate(zip(models, planes, allowed, widths, strict=True)):
        left = {codes for codes, good in zip(shop.codes, ok, strict=True) if good}
        want, bound = oracle.beam_search(model, left, width, ends=model.ends)
        got = results_of(index, result, request)
        assert got == want
        assert result.bound[request] == bound
        if result.certified[request]:
            assert sorted(score for _, score in got) == sorted(
                s for _, s in oracle.top(model, left, len(got), ends=model.ends)
            )
        for leaf, (codes, _) in zip(result.leaves[request], got, strict=False):
            positions = np.arange(*index.catalog.span(int(leaf)))
            kept = positions if plane is None else positions[plane.allows(positions)]
            assert len(kept) > 0
            items = {item for item, c, good in zip(shop.ids, shop.codes, ok, strict=True) if good and c == codes}
            assert set(index.catalog.ids(kept).tolist()) == items


# ---- the shared cases


@pytest.fixture(scope="module")
def catalogue():
    """800 items with ids that are not their rows, on about 410 semantic IDs; sets `half`, `third` and one per cent."""
    rng = np.random.default_rng(11)
    codes = rng.integers(0, SIZES, (800, 3))
    ids = rng.permutation(100_000)[:800]
    sets = {"half": rng.random(800) < 0.5, "third": rng.random(800) < 0.33, "percent": np.arange(800) % 100 == 7}
    sets["tenfold"] = sets["percent"] | (np.arange(800) % 100 == 8)
    index = build_index(codes, codebook_sizes=SIZES, item_ids=ids, sets=sets)
    return index, codes, ids, sets


def search(index: StaticIndex, planes: list, beam_width: int, kernel: str, seed: int = 0) -> BeamResult:
    models = [Model(index, seed)] * len(planes)
    return beam_search(
        stepper(models), index, batch_size=len(planes), beam_width=beam_width, constraints=planes, kernel=kernel
    )


def items_of(index: StaticIndex, result: BeamResult, plane, request: int = 0) -> list[int]:
    """Item ids in the order of the results, filtered as an answer filters them."""
    leaves = result.leaves[request, : int(result.num_valid[request])]
    positions = np.concatenate([np.arange(*index.catalog.span(int(leaf))) for leaf in leaves] or [np.zeros(0, int)])
    return index.catalog.ids(positions[plane.allows(positions)]).tolist()


def distinct(codes: np.ndarray) -> set[oracle.Codes]:
    return {tuple(row) for row in codes.tolist()}


@pytest.mark.case("C01")
@pytest.mark.parametrize("kernel", KERNELS)
def test_excluding_everything_a_beam_returns_gives_the_best_of_what_is_left(catalogue, kernel):
    index, codes, ids, _ = catalogue
    everything = compile_constraint(index)
    first = items_of(index, search(index, [everything], 20, kernel), everything)
    plane = compile_constraint(index, exclude=first)
    result = search(index, [plane], 60, kernel)
    keep = ~np.isin(ids, first)
    assert result.certified[0]
    want = oracle.top(Model(index, 0), distinct(codes[keep]), 10)
    assert results_of(index, result, 0)[:10] == want
    got = items_of(index, result, plane)
    assert len(got) >= 10
    assert not set(got) & set(first)


@pytest.mark.case("C02")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_prefix_with_an_a_item_and_a_b_item_but_none_in_both_is_dead_from_the_start(kernel):
    # Prefix (0,) holds an a-item and a b-item; only (1, 1, 1) is in both.
    codes = np.array([[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 1, 1]])
    sets = {"a": np.array([True, False, True, True]), "b": np.array([False, True, False, True])}
    index = build_index(codes, codebook_sizes=(2, 2, 2), item_ids=[10, 11, 12, 13], sets=sets)
    plane = compile_constraint(index, "a and b")
    model = Model(index, 0)
    asked: list[oracle.Codes] = []

    def watched(prefix):
        asked.append(prefix)
        return model(prefix)

    watched.toy = model.toy
    result = beam_search(stepper([watched]), index, batch_size=1, beam_width=4, constraints=[plane], kernel=kernel)
    assert results_of(index, result, 0) == oracle.beam_search(model, {(1, 1, 1)}, 4)[0]
    assert asked == [(), (1,), (1, 1)]


@pytest.mark.case("C04")
@pytest.mark.parametrize("kernel", KERNELS)
def test_unknown_ids_of_an_include_list_are_ignored_and_counted(catalogue, kernel):
    index, _, ids, _ = catalogue
    unknown = np.setdiff1d(np.arange(100_000), ids)[::100]
    plane = compile_constraint(index, include=[*unknown, ids[5], *unknown, -1, 2**62])
    assert plane.num_unknown == len(unknown) + 2
    assert items_of(index, search(index, [plane], 20, kernel), plane) == [ids[5]]
    nothing = compile_constraint(index, include=unknown)
    assert search(index, [nothing], 20, kernel).num_valid[0] == 0


@pytest.mark.case("C04")
def test_unknown_text_ids_never_stand_for_an_item_with_a_similar_name():
    index = build_index(np.arange(3)[:, None], codebook_sizes=(3,), item_ids=["b", "bb", "d"])
    plane = compile_constraint(index, include=["a", "bbb", "bb ", "c", "e", "d"])
    assert (plane.num_unknown, index.catalog.ids(plane.included).tolist()) == (5, ["d"])


@pytest.mark.case("C05")
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_include_list_of_three_gives_three(catalogue, kernel):
    index, codes, ids, _ = catalogue
    _, first = np.unique(codes, axis=0, return_index=True)
    three = ids[first[[3, 100, 300]]]
    plane = compile_constraint(index, include=three)
    result = search(index, [plane], 10, kernel)
    assert sorted(items_of(index, result, plane)) == sorted(three)
    assert result.certified[0]


@pytest.mark.case("C06")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("expression", [None, "half", "percent"])
def test_excluding_everything_that_is_allowed_gives_nothing(catalogue, kernel, expression):
    index, _, ids, sets = catalogue
    allowed = ids if expression is None else ids[sets[expression]]
    plane = compile_constraint(index, expression, exclude=allowed)
    result = search(index, [plane], 10, kernel)
    assert result.num_valid[0] == 0
    assert result.errors[0] is None


@pytest.mark.case("C07")
@pytest.mark.parametrize("kernel", KERNELS)
def test_requests_of_one_batch_keep_their_own_constraints(catalogue, kernel):
    index, codes, ids, sets = catalogue
    seen = ids[::3]
    planes = [
        compile_constraint(index, "half"),
        compile_constraint(index, "not half"),
        None,
        compile_constraint(index, "third", exclude=seen),
        compile_constraint(index, include=seen),
    ]
    rows = [sets["half"], ~sets["half"], np.ones(800, bool), sets["third"] & ~np.isin(ids, seen), np.isin(ids, seen)]
    result = search(index, planes, 20, kernel)
    for request, keep in enumerate(rows):
        want, _ = oracle.beam_search(Model(index, 0), distinct(codes[keep]), 20)
        assert results_of(index, result, request) == want


@pytest.mark.case("C08")
@pytest.mark.parametrize("kernel", KERNELS)
def test_ten_are_found_when_one_per_cent_is_allowed(catalogue, kernel):
    index, codes, ids, sets = catalogue
    for expression, allowed in (("tenfold", sets["tenfold"]), ("percent", sets["percent"])):
        plane = compile_constraint(index, expression)
        for seed in range(5):
            result = search(index, [plane], 10, kernel, seed)
            items = items_of(index, result, plane)
            assert len(items) >= min(10, allowed.sum())
            assert set(items) <= set(ids[allowed].tolist())
            assert (
                results_of(index, result, 0) == oracle.beam_search(Model(index, seed), distinct(codes[allowed]), 10)[0]
            )
