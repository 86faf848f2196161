"""Semantic IDs of different lengths, normalisers, and what a step may not do: against Hugging Face and by hand."""

import time

import hugging_face
import numba
import numpy as np
import oracle
import pytest
from searching import KERNELS, Stepper, ends_of, leaf_tuples, plane_of, rows_of
from tiny_retriever import VOCAB_SIZE, tiny_t5
from trieton.constraint.compile import compile_constraint
from trieton.retriever.session import Retriever
from trieton.search.beam import beam_search
from trieton.search.kernels import NORMALISE
from trieton_builder.indexing.trie import build_index

each_kernel = pytest.mark.parametrize("kernel", KERNELS)
SIZES = (6, 6, 6, 6)


def varied(rng: np.random.Generator, count: int = 150) -> tuple[np.ndarray, np.ndarray]:
    """Distinct semantic IDs of lengths 1 to 4: codes int [n, 4], -1 behind the end, and lengths."""
    lengths = rng.integers(1, 5, count)
    codes = np.where(np.arange(4) < lengths[:, None], rng.integers(0, 6, (count, 4)), -1)
    codes = np.unique(codes, axis=0)
    return codes, (codes >= 0).sum(1)


@pytest.mark.case("W38")
@each_kernel
def test_a_living_beam_keeps_its_place_beside_one_that_has_ended(kernel):
    """A beam of two: one ID ends early, of two that live the better one turns out badly."""
    index = build_index(
        np.array([[0, 0, 0], [0, 1, 0], [0, 2, 0]]), codebook_sizes=(1, 3, 3), lengths=np.array([1, 3, 3])
    )
    rows = {(): [0.0], (0,): [-9.0, -0.6, -0.7, -0.5], (0, 1): [-5.0, -9, -9, -9], (0, 2): [0.0, -9, -9, -9]}

    class WithLogZ(Stepper):
        def __call__(self, level, codes, parents):
            logits = super().__call__(level, codes, parents)
            return logits, np.zeros(logits.shape[:2], np.float32)

    model = WithLogZ([lambda prefix: np.array(rows[prefix], np.float32)], index)
    result = beam_search(model, index, batch_size=1, beam_width=2, kernel=kernel)
    assert result.codes[0].tolist() == [[0, -1, -1], [0, 2, 0]]
    np.testing.assert_array_equal(result.scores[0], np.array([-0.5, -0.7], np.float32))
    assert result.certified[0]


@pytest.fixture(scope="module")
def model():
    return tiny_t5()


@pytest.fixture(scope="module")
def retriever(make_tiny_retriever):
    return Retriever.open(make_tiny_retriever(SIZES, has_end=True), threads=1)


@pytest.mark.case("W38")
@pytest.mark.parametrize("width", [3, 10, 200])
def test_ids_of_different_lengths_are_found_at_least_as_well_as_hugging_face_finds_them(retriever, model, width):
    """It drops what ends outside of the best `width` of all candidates, so our lists may only be better."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        codes, lengths = varied(rng)
        index = build_index(np.maximum(codes, 0), codebook_sizes=SIZES, lengths=lengths)
        prompt = rng.integers(0, VOCAB_SIZE, 20)
        ours = beam_search(retriever.start([prompt]), index, batch_size=1, beam_width=width)
        theirs, scores = hugging_face.beam_search(model, prompt, codes, retriever.spec.token_map, width)
        assert 0 < len(theirs) <= ours.num_valid[0] == min(width, len(codes))
        assert (ours.scores[0, : len(scores)] >= scores - 1e-4).all()
        if width > len(codes):  # nothing is lost on either side
            assert [tuple(row) for row in ours.codes[0, : len(codes)].tolist()] == theirs


@pytest.mark.case("W40")
@pytest.mark.parametrize("normalise", NORMALISE)
def test_each_normaliser_gives_the_lists_and_scores_of_hugging_face(make_tiny_retriever, model, normalise):
    retriever = Retriever.open(make_tiny_retriever(SIZES), threads=1)
    rng = np.random.default_rng(7)
    codes = np.unique(rng.integers(0, 6, (200, 4)), axis=0)
    allowed = rng.random(len(codes)) < 0.3  # a constraint, which Hugging Face gets as a smaller catalogue
    index = build_index(codes, codebook_sizes=SIZES, sets={"some": allowed})
    prompts = [rng.integers(0, VOCAB_SIZE, 12) for _ in range(3)]
    ours = beam_search(
        retriever.start(prompts),
        index,
        batch_size=3,
        beam_width=8,
        constraints=[compile_constraint(index, "some")] * 3,
        normalise=normalise,
    )
    for b, prompt in enumerate(prompts):
        theirs, scores = hugging_face.beam_search(
            model, prompt, codes[allowed], retriever.spec.token_map, 8, normalise=normalise
        )
        assert [tuple(row) for row in ours.codes[b].tolist()] == theirs
        np.testing.assert_allclose(ours.scores[b], scores, atol=1e-4)


@pytest.mark.case("W40")
@each_kernel
def test_requests_of_one_batch_normalise_as_each_asks(kernel):
    sizes = (9, 9, 9)
    index = build_index(np.random.default_rng(0).integers(0, 9, (150, 3)), codebook_sizes=sizes)
    toy = oracle.ToyModel((12, 12, 12))  # a vocabulary wider than the codes of a level
    plane = plane_of(index, np.arange(index.num_leaves) % 3 == 0, "bits")
    asked = [*NORMALISE, *reversed(NORMALISE)]
    together = beam_search(
        Stepper([toy] * 6, index, width=lambda level: 12),
        index,
        batch_size=6,
        beam_width=10,
        constraints=[plane] * 6,
        kernel=kernel,
        normalise=asked,
    )
    leaves = [leaf for place, leaf in enumerate(leaf_tuples(index)) if place % 3 == 0]
    for b, choice in enumerate(asked):
        want, bound = oracle.beam_search(toy, leaves, 10, ends=ends_of(index), normalise=choice, columns=sizes)
        assert rows_of(together, b, index) == want
        assert together.bound[b] == bound
    assert len({tuple(scores) for scores in together.scores.tolist()}) == 3
    for wrong, text in (("all", "request 0: expected one of"), (["level"], "expected 2, one per request, got 1")):
        with pytest.raises(ValueError, match=f"normalise: {text}"):
            beam_search(lambda *_: None, index, batch_size=2, beam_width=2, kernel=kernel, normalise=wrong)


@pytest.mark.case("W24")
@each_kernel
def test_no_level_is_decoded_when_nothing_lives(kernel, make_tiny_retriever, monkeypatch):
    """IDs of 3 to 20 codes, of which only short ones are allowed: the engine is not asked behind their end."""
    levels, rng = 20, np.random.default_rng(0)
    retriever = Retriever.open(make_tiny_retriever((8,) * levels, has_end=True), threads=1)
    lengths = np.r_[rng.integers(3, 8, 50), rng.integers(8, 21, 50)]
    index = build_index(rng.integers(0, 8, (100, levels)), codebook_sizes=(8,) * levels, lengths=lengths)
    calls, decode = [], retriever.engine.decode
    monkeypatch.setattr(retriever.engine, "decode", lambda *a: calls.append(1) or decode(*a))
    short = compile_constraint(index, include=np.arange(50))
    prompt = [np.arange(3, 9)]
    result = beam_search(
        retriever.start(prompt), index, batch_size=1, beam_width=60, constraints=[short], kernel=kernel
    )
    assert result.num_valid[0] == 50
    assert len(calls) == lengths[:50].max() <= 7
    calls.clear()
    nothing = compile_constraint(index, include=[])
    result = beam_search(
        retriever.start(prompt), index, batch_size=1, beam_width=5, constraints=[nothing], kernel=kernel
    )
    assert result.num_valid[0] == 0
    if kernel != "gpu":
        assert not calls
    calls.clear()
    result = beam_search(retriever.start(prompt), index, batch_size=1, beam_width=200, kernel=kernel)
    assert result.num_valid[0] == 100
    assert len(calls) == min(lengths.max(), levels - 1)


def test_a_plane_of_another_index_is_refused_in_every_form():
    sizes = (8, 8)
    rng = np.random.default_rng(0)
    index, other = (build_index(rng.integers(0, 8, (n, 2)), codebook_sizes=sizes) for n in (20, 60))
    twin = build_index(
        np.stack([index.leaf_codes(np.arange(index.num_leaves))[:, i] for i in (0, 1)], 1), codebook_sizes=sizes
    )
    last = np.arange(other.num_leaves) == other.num_leaves - 1
    wrong = [plane_of(other, last, form) for form in ("bits", "alive")] + [plane_of(other, ~last, "dead")]
    wrong += [compile_constraint(other, include=[0]), compile_constraint(twin, include=[0]), compile_constraint(twin)]
    for plane in wrong:
        with pytest.raises(ValueError, match="request 1: the plane was compiled for another index"):
            beam_search(lambda *_: None, index, batch_size=2, beam_width=2, constraints=[None, plane])


@pytest.mark.case("W44")
def test_no_second_thread_takes_part_in_a_search_unless_it_is_asked_for():
    """Seconds on a core, not of the clock: a busy neighbour changes nothing about them."""
    sizes, batch, beam = (2048,) * 8, 2, 70
    index = build_index(np.random.default_rng(0).integers(0, 2048, (10**5, 8)), codebook_sizes=sizes)
    rng = np.random.default_rng(1)
    logits = [rng.standard_normal((batch, beam if level else 1, 2048)).astype(np.float32) for level in range(8)]

    def share_of_others(**options: int) -> float:
        for runs in (3, 60):
            mine, all_threads = time.thread_time(), time.process_time()
            for _ in range(runs):
                beam_search(lambda level, *_: logits[level], index, batch_size=batch, beam_width=beam, **options)
            mine, all_threads = time.thread_time() - mine, time.process_time() - all_threads
        return (all_threads - mine) / all_threads

    assert share_of_others() < 0.1
    if numba.config.NUMBA_NUM_THREADS > 1:
        assert share_of_others(threads=2) > 0.1
    with pytest.raises(ValueError, match="threads: expected 1 to"):
        beam_search(lambda *_: None, index, batch_size=1, beam_width=1, threads=0)
    with pytest.raises(ValueError, match="threads: expected 1, the kernel 'torch'"):
        beam_search(lambda *_: None, index, batch_size=1, beam_width=1, threads=2, kernel="torch")
