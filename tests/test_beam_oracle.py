"""Every kernel returns what brute force returns, bit for bit, over many small odd catalogues."""

from unittest.mock import patch

import ml_dtypes
import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from searching import EXAMPLES, INTERPRETED, KERNELS, Stepper, assert_same, ends_of, leaf_tuples, plane_of, rows_of
from trieton.search.beam import beam_search
from trieton.search.kernels import NORMALISE, cpu
from trieton_builder.indexing.trie import build_index

SIZES = (1, 2, 3, 31, 257) if INTERPRETED else (1, 2, 3, 31, 257, 2049)
WIDTHS = (1, 2, 5, 12) if INTERPRETED else (1, 2, 5, 17, 70, 300)  # each beam is a program, one after the other


class RoughModel(oracle.ToyModel):
    """Logits with ties (rounded to a grid) and with -inf, as `roughness` asks."""

    def __init__(self, sizes, seed, roughness, dtype=np.float32):
        super().__init__(sizes, seed)
        self.roughness, self.dtype = roughness, dtype

    def __call__(self, prefix):
        logits = super().__call__(prefix)
        if self.roughness == "ties":
            logits = np.round(logits)
        if self.roughness == "flat":
            logits = np.zeros_like(logits)
        if self.roughness == "holes":
            rng = np.random.default_rng([self.seed, 1, *prefix])
            logits[rng.random(len(logits)) < 0.4] = -np.inf
        return logits.astype(self.dtype).astype(np.float32)


def strided(out):
    """The same logits as a view with gaps between rows and between requests."""
    batch, beams, width = out.shape
    wide = torch.full((batch + 1, beams + 2, width + 5), torch.nan)
    wide[:batch, 1 : beams + 1, 3 : width + 3] = torch.from_numpy(out)
    return wide[:batch, 1 : beams + 1, 3 : width + 3]


def transposed(out):
    """The same logits with the vocabulary outermost in memory."""
    return torch.from_numpy(np.ascontiguousarray(out.transpose(2, 0, 1))).permute(1, 2, 0)


FINISH = {
    "torch": (np.float32, torch.from_numpy),
    "numpy": (np.float32, lambda out: out),
    "strided": (np.float32, strided),
    "transposed": (np.float32, transposed),
    "half": (np.float16, lambda out: torch.from_numpy(out).half()),
    "half numpy": (np.float16, lambda out: out.astype(np.float16)),
    "bfloat16": (ml_dtypes.bfloat16, lambda out: torch.from_numpy(out).bfloat16()),
    "bfloat16 numpy": (ml_dtypes.bfloat16, lambda out: out.astype(ml_dtypes.bfloat16)),
}


@st.composite
def searches(draw):
    sizes = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=4)))
    seed = draw(st.integers(0, 2**20))
    rng = np.random.default_rng(seed)
    # Few distinct codes make shared prefixes, many make chains.
    spread = draw(st.sampled_from([2, 8, 4000]))
    num_items = draw(st.sampled_from([0, 1, 3, 12, 60, 200]))
    codes = np.stack([rng.integers(0, min(size, spread), num_items) for size in sizes], axis=1)
    lengths = rng.integers(1, len(sizes) + 1, num_items) if draw(st.booleans()) else None
    index = build_index(codes, codebook_sizes=sizes, lengths=lengths)
    batch = draw(st.integers(1, 3))
    widths = [draw(st.sampled_from(WIDTHS)) for _ in range(batch)]
    forms = [draw(st.sampled_from([None, "bits", "dead", "bits and dead", "alive"])) for _ in range(batch)]
    masks = [rng.random(index.num_leaves) < draw(st.sampled_from([0.02, 0.5, 0.95])) for _ in range(batch)]
    roughness = [draw(st.sampled_from(["plain", "ties", "flat", "holes"])) for _ in range(batch)]
    parallel = draw(st.booleans())
    normalise = [draw(st.sampled_from(NORMALISE)) for _ in range(batch)]
    return index, widths, forms, masks, roughness, normalise, draw(st.sampled_from(sorted(FINISH))), parallel, seed


@settings(max_examples=max(EXAMPLES, 12 if INTERPRETED else 200), deadline=None)
@given(searches())
def test_every_kernel_equals_brute_force_over_odd_catalogues(search):
    index, widths, forms, masks, roughness, normalise, finish, parallel, seed = search
    dtype, finish = FINISH[finish]
    levels = [index.width(level) for level in range(index.num_levels)]
    models = [RoughModel(levels, seed + b, kind, dtype) for b, kind in enumerate(roughness)]
    planes = [plane_of(index, m, form) if form else None for m, form in zip(masks, forms, strict=True)]
    everything = leaf_tuples(index)
    with patch.object(cpu, "PARALLEL_WORK", 0 if parallel else cpu.PARALLEL_WORK):
        results = [
            beam_search(
                Stepper(models, index, finish=finish),
                index,
                batch_size=len(widths),
                beam_width=widths,
                constraints=planes,
                kernel=kernel,
                normalise=normalise,
                threads=2 if parallel and kernel == "cpu" else 1,
            )
            for kernel in KERNELS
        ]
    for b, (model, width) in enumerate(zip(models, widths, strict=True)):
        allowed = everything if forms[b] is None else [c for c, keep in zip(everything, masks[b], strict=True) if keep]
        rules = {"ends": ends_of(index), "normalise": normalise[b], "columns": levels}
        want, bound = oracle.beam_search(model, allowed, width, **rules)
        for result in results:
            assert rows_of(result, b, index) == want
            assert result.bound[b] == bound
            assert result.errors[b] is None
            if result.certified[b]:
                best = oracle.top(model, allowed, width, **rules)
                assert [score for _, score in want] == [score for _, score in best]
    for result in results[1:]:
        assert_same(results[0], result)


@settings(max_examples=max(EXAMPLES, 3 if INTERPRETED else 40), deadline=None)
@given(
    width=st.sampled_from([*SIZES, 64, 128] if INTERPRETED else [*SIZES, 64, 128, 2048, 5000]),
    batch=st.integers(1, 3),
    beam=st.sampled_from([3, 7] if INTERPRETED else [3, 70]),
    fill=st.sampled_from([0.3, 0.9, 1.0]),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 2**20),
)
def test_kernels_agree_bit_for_bit_on_wide_levels(width, batch, beam, fill, scale, seed):
    rng = np.random.default_rng(seed)
    pairs = np.stack(np.meshgrid(np.arange(width), np.arange(3), indexing="ij"), -1).reshape(-1, 2)
    deep = np.stack(np.meshgrid(np.arange(3), np.arange(width), indexing="ij"), -1).reshape(-1, 2)
    for codes, sizes in ((pairs, (width, 3)), (deep, (3, width))):
        index = build_index(codes[rng.random(len(codes)) < fill], codebook_sizes=sizes)
        logits = [rng.standard_normal((batch, beam if level else 1, sizes[level])) * scale for level in range(2)]
        table = [rows.astype(np.float32) for rows in logits]
        planes = [plane_of(index, rng.random(index.num_leaves) < 0.5, "bits") if b % 2 else None for b in range(batch)]
        results = [
            beam_search(
                lambda level, codes, parents, table=table: table[level],
                index,
                batch_size=batch,
                beam_width=beam,
                constraints=planes,
                kernel=kernel,
            )
            for kernel in KERNELS
        ]
        for result in results[1:]:
            assert_same(results[0], result)


@pytest.mark.parametrize("kernel", KERNELS)
def test_log_z_that_comes_with_the_logits_is_used_as_it_is(kernel):
    rng = np.random.default_rng(5)
    sizes = (31, 257)
    index = build_index(np.stack([rng.integers(0, s, 500) for s in sizes], axis=1), codebook_sizes=sizes)
    model = oracle.ToyModel([4000, 4000], seed=1)  # its vocabulary is wider than the codes that the search sees

    def narrowed(prefix):
        full = oracle.log_probs(model(prefix))
        row = np.append(full[: sizes[len(prefix)]], np.float32(0))  # what the oracle normalises over again
        rest = np.log1p(-np.exp(row[:-1].astype(np.float64)).sum())
        row[-1] = rest
        return row

    class WithLogZ(Stepper):
        def __call__(self, level, codes, parents):
            logits = super().__call__(level, codes, parents).numpy()
            log_z = [[np.nan if p is None else _log_z(self.models[0](p)) for p in beams] for beams in self.prefixes]
            return logits[:, :, : sizes[level]], torch.tensor(log_z, dtype=torch.float32)

    def _log_z(row):
        wide = row.astype(np.float64)
        return np.log(np.exp(wide - wide.max()).sum()) + wide.max()

    result = beam_search(
        WithLogZ([model], index, width=lambda level: 4000), index, batch_size=1, beam_width=20, kernel=kernel
    )
    want, _ = oracle.beam_search(narrowed, set(leaf_tuples(index)), 20)
    got = rows_of(result, 0, index)
    assert [codes for codes, _ in got] == [codes for codes, _ in want]
    np.testing.assert_allclose([s for _, s in got], [s for _, s in want], atol=1e-5)


def test_the_reference_counts_every_child_that_is_allowed_and_no_kernel_counts_more():
    for seed in range(12):
        rng = np.random.default_rng(seed)
        sizes = [int(size) for size in rng.choice(SIZES[:5], 3)]
        index = build_index(rng.integers(0, sizes, (int(rng.integers(1, 200)), 3)), codebook_sizes=sizes)
        leaves = leaf_tuples(index)
        widths = rng.integers(1, 12, 3)
        models = [oracle.ToyModel(sizes, 10 * seed + b) for b in range(3)]
        masks = [rng.random(len(leaves)) < share for share in (0.1, 0.5, 1.0)]
        planes = [plane_of(index, mask, form) for mask, form in zip(masks, ("alive", "bits", "dead"), strict=True)]
        counted = [
            beam_search(
                Stepper(models, index), index, batch_size=3, beam_width=widths, constraints=planes, kernel=kernel
            ).ranked
            for kernel in ("torch", "cpu")
        ]
        for b, (model, mask, width) in enumerate(zip(models, masks, widths, strict=True)):
            allowed = [leaf for leaf, true in zip(leaves, mask, strict=True) if true]
            want = 0
            for level in range(3):
                beams = {prefix for prefix, _ in oracle.beam_search(model, {c[:level] for c in allowed}, width)[0]}
                want += len({c[: level + 1] for c in allowed if c[:level] in beams or not level})
            assert counted[0][b] == want
            assert min(want, len(oracle.beam_search(model, allowed, width)[0])) <= counted[1][b] <= want
