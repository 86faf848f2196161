"""The search as callers meet it: the shared cases, errors, and the exact option."""

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import oracle
import pytest
import torch
from searching import KERNELS, Stepper, assert_same, leaf_tuples, plane_of, rows_of
from trieton.constraint.compile import compile_constraint
from trieton.search.beam import beam_search
from trieton.search.kernels import cpu
from trieton_builder.indexing.trie import build_index

each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def random_index(sizes, num_items, seed=0, **options):
    rng = np.random.default_rng(seed)
    codes = np.stack([rng.integers(0, size, num_items) for size in sizes], axis=1)
    return build_index(codes, codebook_sizes=sizes, **options)


def search(model, index, kernel, beam_width, **options):
    models = model if isinstance(model, list) else [model]
    return beam_search(
        Stepper(models, index), index, batch_size=len(models), beam_width=beam_width, kernel=kernel, **options
    )


@pytest.mark.case("B01")
@each_kernel
def test_a_beam_wider_than_the_catalogue_returns_the_catalogue_and_padding(kernel):
    items = [(3, 1, 4), (1, 5, 9), (2, 6, 5)]
    index = build_index(np.array(items), codebook_sizes=(10, 10, 10))
    result = search(oracle.ToyModel((10, 10, 10)), index, kernel, 8)
    assert result.num_valid.tolist() == [3]
    assert {codes for codes, _ in rows_of(result, 0, index)} == set(items)
    assert result.scores.shape == (1, 8)
    assert result.certified.tolist() == [True]


@pytest.mark.case("B02")
@each_kernel
def test_a_beam_may_be_larger_than_the_codebook_and_than_all_leaves(kernel):
    index = random_index((5, 5), 20)
    model = oracle.ToyModel((5, 5))
    result = search(model, index, kernel, 1000)
    assert rows_of(result, 0, index) == oracle.beam_search(model, set(leaf_tuples(index)), 1000)[0]


@pytest.mark.case("B03")
@each_kernel
def test_all_children_of_all_beams_compete_in_a_thousand_random_searches(kernel):
    lost_by_four_children_each = 0
    for seed in range(1000 if kernel != "gpu" else 30):  # interpreted
        index = random_index((2, 6), 12, seed)
        model = oracle.ToyModel((2, 6), seed)
        want, _ = oracle.beam_search(model, set(leaf_tuples(index)), 8)
        assert rows_of(search(model, index, kernel, 8), 0, index) == want
        first = [sum(codes[0] == code for codes, _ in want) for code in range(2)]
        lost_by_four_children_each += max(first) > 4
    assert lost_by_four_children_each > (100 if kernel != "gpu" else 3)


@pytest.mark.case("B04")
@each_kernel
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_numbers_that_are_wrong_fail_their_own_request_only(kernel, poison, level):
    sizes = (31, 31, 31)
    index = random_index(sizes, 300)
    good = [oracle.ToyModel(sizes, seed) for seed in range(3)]

    def bad(prefix):
        logits = good[1](prefix)
        if len(prefix) == level:
            logits[30] = poison
        return logits

    alone = search(good, index, kernel, 12)
    result = search([good[0], bad, good[2]], index, kernel, 12)
    assert result.errors == [None, f"level {level}: NaN or +inf among the logits", None]
    assert result.num_valid.tolist() == [12, 0, 12]
    assert not result.certified[1]
    assert rows_of(result, 1, index) == []
    for b in (0, 2):
        assert rows_of(result, b, index) == rows_of(alone, b, index)


@pytest.mark.case("B05")
@each_kernel
def test_minus_infinity_on_every_allowed_code_gives_no_result(kernel):
    index = build_index(np.array([[1, 0], [2, 1]]), codebook_sizes=(4, 2))

    def model(prefix):
        return np.array([0, -np.inf, -np.inf, 1] if not prefix else [0, 0], np.float32)

    result = search(model, index, kernel, 3)
    assert result.num_valid.tolist() == [0]
    assert result.errors == [None]
    assert not np.isnan(result.scores).any()
    assert search(lambda _: np.full(4, -np.inf, np.float32), index, kernel, 3).num_valid.tolist() == [0]


@pytest.mark.case("B06")
@each_kernel
def test_a_constraint_that_allows_nothing_gives_no_result(kernel):
    index = random_index((8, 8), 40, sets={"even": np.arange(40) % 2 == 0})
    model = oracle.ToyModel((8, 8))
    planes = [
        compile_constraint(index, "even and not even"),
        compile_constraint(index, include=[]),
        plane_of(index, np.zeros(index.num_leaves, bool), "bits"),
        plane_of(index, np.zeros(index.num_leaves, bool), "dead"),
        plane_of(index, np.zeros(index.num_leaves, bool), "alive"),
        None,
    ]
    result = search([model] * 6, index, kernel, 5, constraints=planes)
    assert result.num_valid.tolist() == [0, 0, 0, 0, 0, 5]
    assert result.certified.tolist()[:5] == [True] * 5


@pytest.mark.case("B07")
@each_kernel
def test_the_whole_prefix_counts_not_the_last_code(kernel):
    index = build_index(np.array([[1, 2, 3], [4, 2, 9]]), codebook_sizes=(10, 10, 10))

    def model(prefix):
        logits = np.zeros(10, np.float32)
        logits[[1, 2, 9][len(prefix)]] = 20  # a model that insists on (1, 2, 9)
        return logits

    assert {codes for codes, _ in rows_of(search(model, index, kernel, 4), 0, index)} == {(1, 2, 3), (4, 2, 9)}


@pytest.mark.case("B08")
@each_kernel
def test_a_padded_vocabulary_is_normalised_over_but_never_chosen(kernel):
    index = random_index((6, 6), 30)
    model = oracle.ToyModel((16, 16), spread=3)
    wide = Stepper([model], index, width=lambda level: 16)
    result = beam_search(wide, index, batch_size=1, beam_width=9, kernel=kernel)
    assert rows_of(result, 0, index) == oracle.beam_search(model, set(leaf_tuples(index)), 9)[0]
    narrow = Stepper([oracle.ToyModel((5, 5))], index, width=lambda level: 5)
    with pytest.raises(ValueError, match=r"level 0: expected logits \[1, 1, 6 or wider\], got \[1, 1, 5\]"):
        beam_search(narrow, index, batch_size=1, beam_width=9, kernel=kernel)


@pytest.mark.case("B09")
@each_kernel
def test_a_vocabulary_of_one_code_works_with_a_beam_of_two(kernel):
    index = build_index(np.zeros((1, 3), int), codebook_sizes=(1, 1, 1))
    result = search(oracle.ToyModel((1, 1, 1)), index, kernel, 2)
    assert rows_of(result, 0, index) == [((0, 0, 0), 0.0)]


@pytest.mark.case("B10")
def test_equal_scores_are_ordered_by_parent_then_code_in_every_kernel_and_every_run():
    sizes = (4, 300)
    index = random_index(sizes, 900)

    def flat(prefix):
        return np.zeros(sizes[len(prefix)], np.float32)

    results = [search(flat, index, kernel, 50) for kernel in (*KERNELS, *KERNELS)]
    for result in results:
        assert_same(result, results[0])
        assert result.leaves[0].tolist() == list(range(50))


@pytest.mark.case("B11")
@each_kernel
def test_a_request_does_not_depend_on_its_neighbours(kernel):
    sizes = (31, 257, 31)
    index = random_index(sizes, 2000, sets={"odd": np.arange(2000) % 2 == 1})
    models = [oracle.ToyModel(sizes, seed) for seed in range(8)]
    widths = [10, 3, 64, 10, 1, 200, 10, 7]
    planes = [compile_constraint(index, text) for text in (None, "odd", None, "not odd", "odd", None, None, "odd")]
    together = search(models, index, kernel, widths, constraints=planes)
    for b in range(8):
        alone = search(models[b], index, kernel, widths[b], constraints=[planes[b]])
        assert rows_of(together, b, index) == rows_of(alone, 0, index)
        assert together.bound[b] == alone.bound[0]


@pytest.mark.case("B12")
@each_kernel
def test_hugging_face_generate_finds_the_same_sequences_and_scores(kernel):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes, start = (40, 12, 12), (2, 42, 54)  # token = start of the level + code; 0 pads and starts
    config = T5Config(
        vocab_size=70, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    model = T5ForConditionalGeneration(config).eval()
    for weight in model.parameters():
        weight.data.normal_(std=0.4)
    index = random_index(sizes, 500, seed=3)
    children: dict[tuple[int, ...], list[int]] = {}
    for codes in leaf_tuples(index):
        tokens = tuple(s + c for s, c in zip(start, codes, strict=True))
        for level in range(3):
            children.setdefault(tokens[:level], []).append(tokens[level])
    prompt = torch.randint(2, 70, (2, 7))
    beams = 20
    with torch.no_grad():
        theirs = model.generate(
            prompt,
            num_beams=beams,
            num_return_sequences=beams,
            max_new_tokens=3,
            do_sample=False,
            length_penalty=0.0,
            eos_token_id=None,
            prefix_allowed_tokens_fn=lambda _, sent: children[tuple(sent.tolist()[1:])],
            return_dict_in_generate=True,
            output_scores=True,
        )

    prefixes = torch.zeros((2, 1, 1), dtype=torch.int64)

    def next_logits(level, codes, parents):
        nonlocal prefixes
        if level:
            order = torch.as_tensor(parents).long().clamp(min=0)[:, :, None].expand(-1, -1, level)
            chosen = torch.as_tensor(codes).long().clamp(min=0)[:, :, None] + start[level - 1]
            prefixes = torch.cat([prefixes.gather(1, order), chosen], dim=2)
        width = prefixes.shape[1]
        with torch.no_grad():
            out = model(input_ids=prompt.repeat_interleave(width, 0), decoder_input_ids=prefixes.flatten(0, 1)).logits[
                :, -1
            ]
        out = out.reshape(2, width, -1)
        return out[:, :, start[level] : start[level] + sizes[level]], out.logsumexp(2)

    ours = beam_search(next_logits, index, batch_size=2, beam_width=beams, kernel=kernel)
    their_codes = theirs.sequences[:, 1:].reshape(2, beams, 3) - torch.tensor(start)
    np.testing.assert_array_equal(ours.codes, their_codes.numpy())
    np.testing.assert_allclose(ours.scores, theirs.sequences_scores.reshape(2, beams).numpy(), atol=1e-4)


@pytest.mark.case("B13")
@each_kernel
def test_num_results_takes_the_first_of_the_beam_and_every_request_keeps_its_own_width(kernel):
    sizes = (31, 31, 31)
    index = random_index(sizes, 4000)
    for seed in range(20):
        model = oracle.ToyModel(sizes, seed, spread=0.5)
        wide = search(model, index, kernel, 100)
        both = search([model, model], index, kernel, [100, 10], num_results=10)
        assert rows_of(both, 0, index) == rows_of(wide, 0, index)[:10]
        assert rows_of(both, 1, index) == rows_of(search(model, index, kernel, 10), 0, index)
        assert both.certified[0] == (wide.bound[0] <= wide.scores[0, 9])
        assert both.scores.shape == (2, 10)
        if rows_of(both, 0, index) != rows_of(both, 1, index):
            return
    pytest.fail("a beam of 100 and a beam of 10 never differed")


@pytest.mark.case("B14")
@each_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_the_same_numbers_in_float32(kernel, dtype):
    sizes = (257, 31)
    index = random_index(sizes, 3000)
    half = Stepper([oracle.ToyModel(sizes)], index, finish=lambda out: torch.from_numpy(out).to(dtype))
    full = Stepper([oracle.ToyModel(sizes)], index, finish=lambda out: torch.from_numpy(out).to(dtype).float())
    results = [beam_search(s, index, batch_size=1, beam_width=40, kernel=kernel) for s in (half, full)]
    assert_same(*results)


@each_kernel
def test_types_that_would_lose_digits_are_refused(kernel):
    index = random_index((4,), 4)
    with pytest.raises(ValueError, match=r"expected float32, float16 or bfloat16 from next_logits, got .*float64"):
        beam_search(lambda *_: np.zeros((1, 1, 4)), index, batch_size=1, beam_width=2, kernel=kernel)


@each_kernel
def test_an_empty_catalogue_gives_no_results(kernel):
    index = build_index(np.zeros((0, 2), int), codebook_sizes=(4, 4))
    result = search(oracle.ToyModel((4, 4)), index, kernel, 3)
    assert result.num_valid.tolist() == [0]
    assert result.certified.tolist() == [True]


def test_arguments_that_do_not_fit_are_named():
    index, other = random_index((4, 4), 10), random_index((8, 8), 60)
    model = oracle.ToyModel((4, 4))
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        beam_search(model, index, batch_size=0, beam_width=2)
    with pytest.raises(ValueError, match="beam_width: expected 1 to 16777216, got 0 to 0"):
        search(model, index, "cpu", 0)
    with pytest.raises(ValueError, match=r"beam_width: expected an integer or 1 of them, got \[1, 2\]"):
        search(model, index, "cpu", [1, 2])
    with pytest.raises(ValueError, match="constraints: expected 1, one per request, got 2"):
        search(model, index, "cpu", 2, constraints=[None, None])
    with pytest.raises(ValueError, match="request 0: the plane was compiled for another index"):
        search(model, index, "cpu", 2, constraints=[plane_of(other, np.ones(other.num_leaves, bool), "bits")])
    with pytest.raises(ValueError, match="kernel: expected one of"):
        search(model, index, "fast", 2)
    with pytest.raises(ValueError, match=r"expected next_logits with a method restart\(requests\)"):
        beam_search(lambda *_: None, index, batch_size=1, beam_width=2, exact=True)


@each_kernel
def test_exact_widens_the_beam_until_the_true_top_is_proven(kernel):
    sizes = (31, 31, 31)
    index = random_index(sizes, 3000)
    models = [oracle.ToyModel(sizes, seed, spread=1.0) for seed in range(4)]
    narrow = search(models, index, kernel, [5, 8, 5, 2])
    assert not narrow.certified.all()
    result = search(models, index, kernel, [5, 8, 5, 2], exact=True)
    assert result.certified.all()
    for b, (model, width) in enumerate(zip(models, [5, 8, 5, 2], strict=True)):
        assert rows_of(result, b, index) == oracle.top(model, leaf_tuples(index), width)
        if narrow.certified[b]:
            assert rows_of(result, b, index) == rows_of(narrow, b, index)


@each_kernel
def test_exact_stops_at_its_limit_and_says_so(kernel):
    sizes = (31, 31, 31)
    index = random_index(sizes, 3000)
    model = oracle.ToyModel(sizes, 1, spread=0.1)
    result = search(model, index, kernel, 10, num_results=5, exact=True, max_beam_width=25)
    assert not result.certified[0]
    assert rows_of(result, 0, index) == rows_of(search(model, index, kernel, 25), 0, index)[:5]


@each_kernel
def test_a_log_z_that_is_no_number_fails_its_request_and_minus_infinity_offers_nothing(kernel):
    index = random_index((9, 9), 60)
    logits = np.random.default_rng(0).standard_normal((4, 3, 9)).astype(np.float32)
    log_z = [np.full((4, 1), 3, np.float32), np.full((4, 3), 3, np.float32)]
    log_z[1][1, 2], log_z[1][2, 0], log_z[1][3] = np.nan, np.inf, -np.inf
    result = beam_search(
        lambda level, *_: (logits[:, : 3 if level else 1], log_z[level]),
        index,
        batch_size=4,
        beam_width=3,
        kernel=kernel,
    )
    text = "level 1: NaN or +inf among the logits"
    assert result.errors == [None, text, text, None]
    assert result.num_valid.tolist() == [3, 0, 0, 0]


@pytest.mark.parametrize("work", [0, 1 << 60])
def test_searches_of_several_threads_do_not_disturb_each_other(work, monkeypatch):
    monkeypatch.setattr(cpu, "PARALLEL_WORK", work)
    sizes = (31, 257, 31)
    index = random_index(sizes, 2000)
    models = [oracle.ToyModel(sizes, seed) for seed in range(6)]
    alone = [search(model, index, "cpu", 20) for model in models]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda model: search(model, index, "cpu", 20, threads=2), [*models, *models]))
    for got, want in zip(together, [*alone, *alone], strict=True):
        assert_same(got, want)


def test_widths_and_batches_of_every_shape_share_the_threads_alike(monkeypatch):
    sizes = (31, 31)
    index = random_index(sizes, 500)
    models = [oracle.ToyModel(sizes, seed) for seed in range(9)]
    alone = [search(model, index, "cpu", 7) for model in models]
    monkeypatch.setattr(cpu, "PARALLEL_WORK", 0)
    for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
        for batch in range(1, 10):
            result = search(models[:batch], index, "cpu", 7, threads=threads)
            assert [rows_of(result, b, index) for b in range(batch)] == [rows_of(r, 0, index) for r in alone[:batch]]
