"""The index holds exactly the semantic IDs it was given, whatever their shape."""

import warnings
from collections import defaultdict
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ToyModel
from trie_walk import accepted, children_of, walk
from trieton.index.static_index import StaticIndex
from trieton.search.beam import beam_search
from trieton.search.dense_head import dense_head
from trieton_builder.indexing import survey as survey_module
from trieton_builder.indexing import trie
from trieton_builder.indexing.trie import build_index

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@st.composite
def catalogues(draw: st.DrawFn) -> dict:
    """Arguments of `build_index`: rows in any order, collisions, short semantic IDs, string ids, named sets."""
    sizes = draw(SIZES)
    row = st.tuples(*(st.integers(0, size - 1) for size in sizes))
    rows = draw(st.lists(row, max_size=40))
    codes = np.array(rows, np.int64).reshape(len(rows), len(sizes))
    given_lengths = draw(st.booleans())
    lengths = draw(st.lists(st.integers(1, len(sizes)), min_size=len(rows), max_size=len(rows)))
    ids: np.ndarray | None = None
    kind = draw(st.sampled_from(["rows", "int", "text"]))
    if kind != "rows":
        numbers = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=len(rows), max_size=len(rows), unique=True))
        ids = np.array(numbers, np.int64) if kind == "int" else np.array([f"é{n}" for n in numbers], object)
    sets = {"some": np.array(draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))), np.bool_)}
    sets["few"] = sets["some"] & (np.arange(len(rows)) % 50 == 0)
    return {
        "codes": codes.astype(draw(st.sampled_from([np.int64, np.int32, np.uint8, np.uint64]))),
        "codebook_sizes": sizes,
        "lengths": np.array(lengths, np.int64) if given_lengths else None,
        "item_ids": ids,
        "sets": sets,
    }


def semantic_ids(case: dict) -> list[tuple[int, ...]]:
    """The rows as the trie has them: short ones end with the end code."""
    codes, sizes, lengths = case["codes"], case["codebook_sizes"], case["lengths"]
    rows = [tuple(map(int, row)) for row in codes]
    if lengths is not None:
        rows = [row[:n] + tuple(sizes[n:]) for row, n in zip(rows, lengths.tolist(), strict=True)]
    return rows


def build(case: dict, *, max_tail_span: int = 128, int32_max: int | None = None) -> StaticIndex:
    with patch.object(trie, "MAX_TAIL_SPAN", max_tail_span):
        if int32_max is None:
            return build_index(**case).validate()
        with patch.object(survey_module, "INT32_MAX", int32_max):
            return build_index(**case).validate()


@settings(deadline=None, max_examples=150)
@given(catalogues(), st.sampled_from([0, 1, 3, 128]))
def test_every_prefix_has_exactly_the_child_codes_of_the_trie(case: dict, max_tail_span: int) -> None:
    index = build(case, max_tail_span=max_tail_span)
    rows = semantic_ids(case)
    assert walk(index) == children_of(set(rows))
    assert index.num_leaves == len(set(rows))
    assert index.num_items == len(rows)
    shown = [tuple(row) for row in index.leaf_codes(np.arange(index.num_leaves)).tolist()]
    sizes = case["codebook_sizes"]
    wanted = [tuple(-1 if code == size else code for code, size in zip(row, sizes, strict=True)) for row in set(rows)]
    # Leaves are numbered in order of their codes, the end code behind all others.
    assert shown == [row for _, row in sorted(zip(sorted(set(rows)), sorted(wanted, key=_end_last), strict=True))]


def _end_last(row: tuple[int, ...]) -> list[float]:
    return [float("inf") if code < 0 else code for code in row]


@settings(deadline=None, max_examples=100)
@given(catalogues())
def test_items_of_a_leaf_keep_the_order_of_the_rows(case: dict) -> None:
    index = build(case)
    ids = list(range(len(case["codes"]))) if case["item_ids"] is None else case["item_ids"].tolist()
    by_leaf = defaultdict(list)
    for item, row in zip(ids, semantic_ids(case), strict=True):
        by_leaf[row].append(item)
    position = 0
    for leaf, row in enumerate(sorted(by_leaf)):
        low, high = index.catalog.span(leaf)
        assert low == position
        assert index.catalog.ids(np.arange(low, high)).tolist() == by_leaf[row]
        assert index.catalog.leaves(np.arange(low, high)).tolist() == [leaf] * (high - low)
        position = high
    assert position == index.num_items


@settings(deadline=None, max_examples=100)
@given(catalogues())
def test_ids_and_named_sets_follow_their_items(case: dict) -> None:
    index = build(case)
    ids = np.arange(len(case["codes"])) if case["item_ids"] is None else case["item_ids"]
    positions = index.catalog.positions(ids)
    assert sorted(positions.tolist()) == list(range(index.num_items))
    assert index.catalog.ids(positions).tolist() == ids.tolist()
    for name, mask in case["sets"].items():
        bits = np.unpackbits(index.sets[name], count=index.num_items, bitorder="little").astype(bool)
        assert bits[positions].tolist() == mask.tolist()
        assert index.sets.sizes()[name] == int(mask.sum())


@settings(deadline=None, max_examples=100)
@given(catalogues(), st.data())
def test_the_published_layout_accepts_exactly_the_same_sequences(case: dict, data: st.DataObject) -> None:
    index = build(case, max_tail_span=data.draw(st.sampled_from([0, 128])))
    for dense_layers in range(min(3, index.num_levels)):
        assert accepted(index.to_static(dense_layers), index.num_levels) == set(semantic_ids(case))


@settings(deadline=None, max_examples=60)
@given(catalogues())
def test_the_dense_head_leads_to_the_same_edges(case: dict) -> None:
    index = build(case)
    head = dense_head(index, min_fill=0)
    assert head.layers == min(2, index.num_levels)
    trie_children = children_of(set(semantic_ids(case)))
    edge = 0
    for first in trie_children[()]:
        for second in trie_children.get((first,), []) if index.num_levels > 1 else []:
            assert int(head.states[1][first, second]) == edge
            edge += 1
    assert int((head.states[0] >= 0).sum()) == len(trie_children[()])
    for mask, states in zip(head.masks, head.states, strict=True):
        bits = np.unpackbits(mask, axis=1, count=states.shape[1], bitorder="little").astype(bool)
        assert (bits == (states >= 0)).all()


def test_the_depth_of_the_dense_head_follows_fan_out_and_memory() -> None:
    rng = np.random.default_rng(0)
    full = build_index(rng.integers(0, 16, (2000, 3)), codebook_sizes=[16] * 3)
    assert dense_head(full).layers == 2
    assert dense_head(full, memory=500).layers == 1
    assert dense_head(full, memory=10).layers == 0
    chains = build_index(np.arange(64)[:, None].repeat(3, 1), codebook_sizes=[64] * 3)
    assert dense_head(chains).layers == 1  # every state of the second level has one child of 64


@pytest.mark.parametrize("dense_layers", [-1, 3])
def test_the_published_layout_refuses_other_depths(dense_layers: int) -> None:
    index = build_index(np.zeros((1, 4), np.int64), codebook_sizes=[2] * 4)
    with pytest.raises(ValueError, match="dense_layers: expected 0 to 2"):
        index.to_static(dense_layers)


@pytest.mark.case("I01")
def test_unsorted_rows_are_all_reachable_and_nothing_else_is() -> None:
    index = build_index(np.array([[1, 2, 3], [0, 1, 2], [1, 2, 4]]), codebook_sizes=[8, 8, 8])
    assert walk(index) == children_of({(1, 2, 3), (0, 1, 2), (1, 2, 4)})
    assert index.catalog.item_ids.tolist() == [1, 0, 2]
    assert index.catalog.positions([0, 1, 2]).tolist() == [1, 0, 2]


@pytest.mark.case("I02")
def test_a_code_beyond_its_codebook_names_row_level_value_and_bound() -> None:
    codes = np.array([[1, 2, 3], [1, 2, 99], [1, 2, 98]])
    with pytest.raises(ValueError, match=r"row 1, level 2: expected 0 <= code < 8, got 99 \(2 such codes\)"):
        build_index(codes, codebook_sizes=[8, 8, 8])


@pytest.mark.case("I03")
def test_a_negative_code_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row 0, level 0: expected 0 <= code < 8, got -1"):
        build_index(np.array([[-1, 2, 3]]), codebook_sizes=[8, 8, 8])


def test_the_first_bad_row_is_found_beyond_the_first_piece() -> None:
    codes = np.zeros((600_000, 2), np.uint8)
    codes[555_555, 1] = 9
    with pytest.raises(ValueError, match=r"row 555555, level 1: expected 0 <= code < 8, got 9"):
        build_index(codes, codebook_sizes=[8, 8])


def search(index: StaticIndex, beam_width: int = 4) -> object:
    """One request with a model that depends on the prefix."""
    model = ToyModel([index.width(level) for level in range(index.num_levels)])
    prefixes: list[tuple[int, ...]] = [()]

    def next_logits(level: int, codes: np.ndarray, parents: np.ndarray) -> np.ndarray:
        nonlocal prefixes
        if level:
            prefixes = [
                (*prefixes[max(int(p), 0)], min(max(int(c), 0), index.width(level - 1) - 1))
                for c, p in zip(np.asarray(codes)[0], np.asarray(parents)[0], strict=True)
            ]
        return np.stack([model(prefix) for prefix in prefixes])[None]

    return beam_search(next_logits, index, batch_size=1, beam_width=beam_width, kernel="cpu")


@pytest.mark.case("I04")
@pytest.mark.parametrize("codes", [np.zeros((0, 3), np.int64), np.array([]), []])
def test_no_items_make_an_empty_index_whose_searches_find_nothing(codes: np.ndarray, tmp_path) -> None:
    index = build_index(codes, codebook_sizes=[8, 8, 8], sets={"none": np.zeros(0, np.bool_)}).validate()
    index.save(tmp_path / "empty.safetensors")
    index = StaticIndex.load(tmp_path / "empty.safetensors")
    assert (index.num_items, index.num_leaves, index.num_levels) == (0, 0, 3)
    assert search(index).num_valid.tolist() == [0]
    assert index.catalog.positions([1, 2]).tolist() == [-1, -1]
    assert accepted(index.to_static(2), 3) == set()


@pytest.mark.case("I05")
def test_one_level_is_one_step() -> None:
    index = build_index(np.array([[3], [1], [5]]), codebook_sizes=[8])
    result = search(index)
    assert result.num_valid.tolist() == [3]
    assert sorted(result.codes[0, :3, 0].tolist()) == [1, 3, 5]


@pytest.mark.case("I06")
def test_two_hundred_levels_work() -> None:
    codes = np.zeros((2, 200), np.int64)
    codes[1, 150] = 1
    index = build_index(codes, codebook_sizes=[2048] * 200).validate()
    assert walk(index) == children_of({tuple(row) for row in codes.tolist()})
    result = search(index)
    assert result.num_valid.tolist() == [2]
    assert sorted(result.codes[0, :2].sum(axis=1).tolist()) == [0, 1]


@pytest.mark.case("I07")
def test_three_items_with_one_semantic_id_are_one_leaf() -> None:
    index = build_index(np.array([[1, 2]] * 3 + [[1, 3]]), codebook_sizes=[8, 8], item_ids=[30, 10, 20, 5])
    assert (index.num_leaves, index.num_items) == (2, 4)
    assert index.catalog.ids(np.arange(*index.catalog.span(0))).tolist() == [30, 10, 20]
    result = search(index)
    assert result.num_valid.tolist() == [2]


@pytest.mark.case("I08")
def test_a_repeated_row_is_refused_or_dropped_and_counted() -> None:
    case = {"codes": np.array([[1, 2], [0, 0], [1, 2], [1, 2]]), "codebook_sizes": [8, 8], "item_ids": [7, 8, 7, 7]}
    with pytest.raises(ValueError, match=r"item 7 with semantic ID \[1, 2\] stands in row 0 and row 2"):
        build_index(**case)
    with pytest.warns(UserWarning, match="2 rows repeat an item and were dropped"):
        index = build_index(**case, drop_repeats=True)
    assert index.validate().catalog.item_ids.tolist() == [8, 7]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = build_index(case["codes"][:2], codebook_sizes=[8, 8], item_ids=[7, 8], drop_repeats=True)
    assert same.trie_tensors().keys() == index.trie_tensors().keys()


@pytest.mark.case("I09")
@pytest.mark.parametrize("drop_repeats", [False, True])
def test_one_item_with_two_semantic_ids_names_both_rows(drop_repeats: bool) -> None:
    with pytest.raises(ValueError, match=r"item 'a' has two semantic IDs: row 0 \[1, 2\], row 2 \[1\]"):
        build_index(
            np.array([[1, 2], [0, 0], [1, 0], [0, 0]]),
            codebook_sizes=[8, 8],
            lengths=np.array([2, 2, 1, 2]),
            item_ids=["a", "b", "a", "b"],
            drop_repeats=drop_repeats,
        )


@pytest.mark.case("I10")
@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.array([[1.0, 2.0]]), "expected integers, got dtype float64"),
        (np.array([["1", "2"]]), "expected integers"),
        (np.array([[True, False]]), "expected integers, got dtype bool"),
        (np.array([[1, 2**40]]), f"level 1: expected 0 <= code < 8, got {2**40}"),
        (np.array([[1, 2**64 - 1]], np.uint64), f"level 1: expected 0 <= code < 8, got {2**64 - 1}"),
        (np.array([[1, 2**63 + 2]], np.uint64), f"level 1: expected 0 <= code < 8, got {2**63 + 2}"),
        (np.array([1, 2]), r"expected shape \[N, 2\]"),
        (np.array([[1, 2, 3]]), r"expected shape \[N, 2\]"),
    ],
)
def test_codes_are_never_cast(codes: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_index(codes, codebook_sizes=[8, 8])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codebook_sizes": []}, "codebook_sizes: expected one number per level"),
        ({"codebook_sizes": [8, 0]}, "codebook_sizes: level 1: expected 1 to"),
        ({"codebook_sizes": [8, 2**31]}, "codebook_sizes: level 1: expected 1 to"),
        ({"codebook_sizes": [8, 2.5]}, "codebook_sizes: level 1"),
        ({"item_ids": [1]}, "item_ids: expected 2, one per row of codes, got 1"),
        ({"item_ids": [1.5, 2.5]}, "item ids: expected integers"),
        ({"item_ids": ["a", 2]}, "item ids: row 1: expected a string"),
        ({"item_ids": np.array([1, 2**63], np.uint64)}, "item ids: expected integers of at most 64 bits"),
        ({"item_ids": ["a", ""]}, "item ids: row 1: expected 1 to 255 bytes"),
        ({"item_ids": ["a", "b\0"]}, "item ids: row 1"),
        ({"lengths": [1]}, "lengths: expected 2 integers"),
        ({"lengths": [0, 2]}, "lengths: row 0: expected 1 to 2, got 0"),
        ({"lengths": [1, 3]}, "lengths: row 1: expected 1 to 2, got 3"),
        ({"sets": {"s": np.array([1, 0])}}, r"sets: 's': expected bool \[2\]"),
        ({"sets": {"s": np.array([True])}}, r"sets: 's': expected bool \[2\]"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_index(**{"codes": np.array([[1, 2], [3, 4]]), "codebook_sizes": [8, 8]} | arguments)


@pytest.mark.case("I11")
def test_memory_grows_with_items_and_codebooks_not_with_the_vocabulary() -> None:
    codes = np.random.default_rng(0).integers(0, 8192, (20_000, 3))
    index = build_index(codes, codebook_sizes=[8192] * 3)  # of a vocabulary of 151,936 tokens
    assert index.nbytes < 20_000 * 12 + 8192 * 8
    assert dense_head(index).nbytes <= 64 << 20


@pytest.mark.case("I13")
def test_a_semantic_id_may_be_a_prefix_of_another() -> None:
    index = build_index(np.array([[3, 1, 4], [3, 1, 0]]), codebook_sizes=[5, 6, 7], lengths=np.array([3, 2]))
    assert index.has_end
    assert [index.width(level) for level in range(3)] == [5, 7, 8]
    assert walk(index) == children_of({(3, 1, 4), (3, 1, 7)})
    assert index.leaf_codes(np.array([0, 1])).tolist() == [[3, 1, 4], [3, 1, -1]]
    result = search(index)
    assert sorted(map(tuple, result.codes[0, :2].tolist())) == [(3, 1, -1), (3, 1, 4)]


@pytest.mark.case("I16")
@settings(deadline=None, max_examples=60)
@given(catalogues(), st.sampled_from([0, 3]), st.integers(0, 12))
def test_offsets_widen_before_they_overflow(case: dict, max_tail_span: int, int32_max: int) -> None:
    narrow = build(case, max_tail_span=max_tail_span)
    wide = build(case, max_tail_span=max_tail_span, int32_max=int32_max)
    assert walk(wide) == walk(narrow)
    catalog = wide.catalog
    for offsets in [*wide.row_ptr, catalog.order, *([] if catalog.leaf_ptr is None else [catalog.leaf_ptr])]:
        largest = wide.num_items if offsets is catalog.order else int(offsets[-1])
        assert offsets.dtype == (np.int32 if largest <= int32_max else np.int64)
    leaves = np.arange(wide.num_leaves)
    assert (wide.leaf_codes(leaves) == narrow.leaf_codes(leaves)).all()
    assert (catalog.positions(narrow.catalog.ids(leaves)) == narrow.catalog.positions(narrow.catalog.ids(leaves))).all()


def test_a_search_through_wide_offsets_finds_the_same() -> None:
    rng = np.random.default_rng(0)
    case = {"codes": rng.integers(0, 8, (300, 4)), "codebook_sizes": [8] * 4}
    narrow, wide = build(case, max_tail_span=16), build(case, max_tail_span=16, int32_max=2)
    assert 0 < wide.head_levels < 4
    assert {offsets.dtype.name for offsets in wide.row_ptr} == {"int64"}
    found, wanted = search(wide, 10), search(narrow, 10)
    assert found.leaves.tolist() == wanted.leaves.tolist()
    assert found.scores.tolist() == wanted.scores.tolist()
