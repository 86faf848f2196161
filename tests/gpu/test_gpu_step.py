"""The OpenAI Triton kernel equals the reference bit for bit, on a GPU or under the interpreter (TRITON_INTERPRET=1).

Needs no more than torch, OpenAI Triton, NumPy, numba, safetensors and pytest, so that any GPU machine can run it.
"""

import os

import numpy as np
import oracle
import pytest
import torch
from searching import Stepper, assert_same, plane_of
from trieton.index.static_index import StaticIndex
from trieton.search.beam import beam_search
from trieton_builder.indexing.trie import build_index

ON_GPU = torch.cuda.is_available()
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA GPU here; tests/test_kernels_gpu.py interprets these", allow_module_level=True)
CASES = 30 if ON_GPU else 4  # most of it is compiling on a GPU, and interpreting elsewhere
LARGEST = 2049 if ON_GPU else 257
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="the interpreter has no device to wait for, and is slow")


@pytest.fixture
def device_index(tmp_path):
    def move(index: StaticIndex) -> StaticIndex:
        index.save(tmp_path / "index.safetensors")
        return StaticIndex.load(tmp_path / "index.safetensors", device="cuda" if ON_GPU else "cpu")

    return move


def compare(index, on_device, models, widths, planes=None, finish=torch.from_numpy):
    def finish_on_device(out):
        return finish(out).cuda() if ON_GPU else finish(out)

    class Host(Stepper):
        def __call__(self, level, codes, parents):
            return super().__call__(level, *(t.cpu() if isinstance(t, torch.Tensor) else t for t in (codes, parents)))

    options = {"batch_size": len(widths), "beam_width": widths, "constraints": planes}
    want = beam_search(Stepper(models, index, finish=finish), index, kernel="torch", **options)
    got = beam_search(Host(models, on_device, finish=finish_on_device), on_device, kernel="gpu", **options)
    assert_same(want, got)


def strided(out):
    batch, beams, width = out.shape
    wide = torch.full((batch, beams + 2, 2 * width + 1), torch.nan)
    wide[:, 1 : beams + 1, 1::2] = torch.from_numpy(out)
    return wide[:, 1 : beams + 1, 1::2]


FINISH = [
    torch.from_numpy,
    lambda out: torch.from_numpy(out).half(),
    lambda out: torch.from_numpy(out).bfloat16(),
    strided,
]
FORMS = [None, "bits", "dead", "bits and dead", "alive"]


@pytest.mark.parametrize("seed", range(CASES))
def test_the_kernel_equals_the_reference_bit_for_bit(seed, device_index):
    rng = np.random.default_rng(seed)
    sizes = [int(s) for s in rng.choice([s for s in (1, 2, 3, 31, 257, 2049) if s <= LARGEST], rng.integers(1, 5))]
    num_items = int(rng.choice([1, 3, 60, 200]))
    codes = np.stack([rng.integers(0, min(size, int(rng.choice([2, 9, 4000]))), num_items) for size in sizes], axis=1)
    lengths = rng.integers(1, len(sizes) + 1, num_items) if seed % 3 == 0 else None
    index = build_index(codes, codebook_sizes=sizes, lengths=lengths)
    widths = [int(w) for w in rng.choice([1, 2, 5, 17, 70] if ON_GPU else [1, 2, 5, 17], rng.integers(1, 4))]
    planes = []
    for _ in widths:
        form, mask = FORMS[rng.integers(len(FORMS))], rng.random(index.num_leaves) < rng.choice([0.05, 0.5, 0.95])
        planes.append(plane_of(index, mask, form) if form else None)
    columns = [index.width(level) for level in range(index.num_levels)]
    spread = 0.0 if seed % 4 == 3 else 2.0
    models = [oracle.ToyModel(columns, seed + b, spread=spread) for b in range(len(widths))]
    compare(index, device_index(index), models, widths, planes, FINISH[seed % len(FINISH)])


def test_more_children_than_one_block_sorts_are_merged(device_index, monkeypatch):
    from trieton.search.kernels import gpu

    rng = np.random.default_rng(0)
    sizes = (LARGEST, 3)
    if not ON_GPU:
        monkeypatch.setattr(gpu, "MAX_SORT", 32)
    index = build_index(np.stack([rng.permutation(LARGEST), rng.integers(0, 3, LARGEST)], 1), codebook_sizes=sizes)
    planes = [plane_of(index, rng.random(index.num_leaves) < 0.7, "bits")]
    compare(index, device_index(index), [oracle.ToyModel(sizes)], [9], planes)


@pytest.mark.case("W39")
@pytest.mark.parametrize(
    ("beam", "children"),
    [
        pytest.param(512, 2048, marks=needs_gpu),
        (600, 1500),
        pytest.param(1100, 3000, marks=needs_gpu),
    ],
)
def test_a_wide_beam_over_many_children_keeps_the_best_of_every_block(beam, children, device_index):
    index = build_index(np.arange(children)[:, None], codebook_sizes=(children,))
    mask = np.random.default_rng(beam).random(children) < 0.9
    planes = [plane_of(index, mask, "bits")]
    compare(index, device_index(index), [oracle.ToyModel((children,))], [beam], planes)


@pytest.mark.case("W39")
@pytest.mark.parametrize(("beam", "block"), [(3, 4), (4, 4), (5, 4), (8, 4), (15, 16), (16, 16)])
def test_beams_children_and_blocks_around_powers_of_two(beam, block, device_index, monkeypatch):
    from trieton.search.kernels import gpu

    monkeypatch.setattr(gpu, "MAX_SORT", block)
    for children in (block - 1, block, block + 1, 2 * block, 2 * block + 1, 4 * block + 3):
        codes = np.stack(np.meshgrid(np.arange(2), np.arange(children), indexing="ij"), -1).reshape(-1, 2)
        index = build_index(codes, codebook_sizes=(2, children))
        compare(index, device_index(index), [oracle.ToyModel((2, children), seed=children)], [beam])


@pytest.mark.case("W39")
def test_a_beam_wider_than_the_kernel_is_made_for_is_refused_by_name(device_index):
    from trieton.search.kernels.gpu import MAX_BEAM

    index = device_index(build_index(np.arange(4)[:, None], codebook_sizes=(4,)))
    with pytest.raises(ValueError, match=f"beam_width: the gpu kernel takes at most {MAX_BEAM}, got {MAX_BEAM + 1}"):
        beam_search(lambda *_: None, index, batch_size=1, beam_width=MAX_BEAM + 1, kernel="gpu")


@pytest.mark.parametrize("form", ["bits", "alive"])
def test_a_long_run_of_leaves_is_one_child_and_lives_with_any_of_them(form, device_index):
    leaf = np.arange(100)
    codes = np.stack([leaf * 0, np.maximum(leaf - 39, 0), leaf, leaf, leaf], axis=1)  # 40 leaves begin with (0, 0)
    sizes = (1, 61, 100, 100, 100)
    index = build_index(codes, codebook_sizes=sizes)
    assert index.head_levels == 1
    allowed = (leaf == 39) | (leaf == 70)
    compare(index, device_index(index), [oracle.ToyModel(sizes)], [4], [plane_of(index, allowed, form)])


@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf])
def test_numbers_that_are_wrong_fail_one_request(poison, device_index):
    index = build_index(np.stack([np.arange(12) % 4, np.arange(12) // 4], axis=1), codebook_sizes=(4, 3))
    good = oracle.ToyModel((4, 3))

    def bad(prefix):
        logits = good(prefix)
        if prefix == (2,):
            logits[1] = poison
        return logits

    compare(index, device_index(index), [good, bad], [4, 4])


def test_log_z_that_comes_with_the_logits_is_used_as_it_is(device_index):
    rng = np.random.default_rng(2)
    index = build_index(rng.integers(0, 9, (50, 2)), codebook_sizes=(9, 9))
    logits = [torch.from_numpy(rng.standard_normal((2, 7 if level else 1, 9)).astype(np.float32)) for level in (0, 1)]
    log_z = [rows.logsumexp(2) + 1 for rows in logits]
    log_z[1][1, 3] = -torch.inf
    results = []
    for kernel, held in (("torch", index), ("gpu", device_index(index))):
        device = held.device if kernel == "gpu" else "cpu"
        steps = [(rows.to(device), z.to(device)) for rows, z in zip(logits, log_z, strict=True)]
        results.append(
            beam_search(
                lambda level, codes, parents, steps=steps: steps[level], held, batch_size=2, beam_width=7, kernel=kernel
            )
        )
    assert_same(*results)


@needs_gpu
def test_a_search_never_waits_for_the_device_and_replays_in_a_cuda_graph(device_index):
    from trieton.search.kernels import cpu, gpu

    rng = np.random.default_rng(1)
    sizes, batch, beam = (64, 64, 64, 64), 3, 20
    index = build_index(rng.integers(0, 64, (5000, 4)), codebook_sizes=sizes)
    widths = np.array([20, 7, 1], np.int32)
    planes = [None, plane_of(index, rng.random(index.num_leaves) < 0.3, "bits"), None]
    logits = [torch.empty((batch, beam if level else 1, 64), device="cuda") for level in range(4)]
    search = gpu.Search(device_index(index), widths, planes)

    def steps():
        for level in range(4):
            search.step(level, logits[level], None)

    steps()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    for seed in range(20):
        host = [torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed)) for rows in logits]
        for rows, values in zip(logits, host, strict=True):
            rows.copy_(values)
        graph.replay()
        reference = cpu.Search(index, widths, planes)
        for level in range(4):
            reference.step(level, host[level], None)
        got, want = search.result(), reference.result()
        for name in ("scores", "codes", "leaves", "bound", "failed"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
