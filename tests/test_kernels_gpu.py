"""The OpenAI Triton kernel without a GPU: `tests/gpu` under the interpreter, and compilation for real targets."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from searching import Stepper
from trieton.search.beam import beam_search
from trieton_builder.indexing.trie import build_index

pytest.importorskip("triton", reason="OpenAI Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("a GPU is here: tests/gpu runs on it", allow_module_level=True)


def run(arguments: list[str], interpret: bool) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, because OpenAI Triton decides on import whether it interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=170, check=False
    )


def test_the_interpreted_kernel_passes_the_tests_of_the_gpu():
    files = [str(Path(__file__).parent / "gpu" / name) for name in ("test_gpu_step.py", "test_gpu_captured.py")]
    done = run(["-m", "pytest", "-q", "-x", "--show-capture=no", *files], interpret=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_the_interpreted_kernel_passes_the_tests_that_every_kernel_passes():
    here = Path(__file__).parent
    chosen = [str(here / "test_beam.py"), str(here / "test_beam_ends.py"), "-k", "gpu"]
    done = run(["-m", "pytest", "-q", "-x", "--show-capture=no", *chosen], interpret=True)
    assert done.returncode == 0, done.stdout[-4000:]
    oracle_tests = [str(here / "test_beam_oracle.py"), "-k", "brute_force or wide_levels or log_z"]
    done = run(["-m", "pytest", "-q", "-x", "--show-capture=no", *oracle_tests], interpret=True)
    assert done.returncode == 0, done.stdout[-4000:]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trieton.search.kernels import gpu

RANK = dict(logits="*fp32", stride_b="i32", stride_m="i32", stride_v="i32", width="i32", columns="i32",
    given_z="*fp32", score="*fp32", lo="*i64", hi="*i64", root_lo="i32", root_hi="i32", codes="*i16", code_mask="i32",
    end_code="i32", planes="*i64", plane_stride="i32", modes="*i32", keys="*i64", bad="*i32", end_keys="*i64",
    end_edges="*i64", level="i32", beams="i32", M="i32", S="i32")
KEEP = dict(keys="*i64", bad="*i32", end_keys="*i64", ended="*i64", widths="*i64", lo="*i64", hi="*i64", root_lo="i32",
    root_hi="i32", codes="*i16", code_mask="i32", spans="*i32", new_score="*fp32", new_lo="*i64", new_hi="*i64",
    new_codes="*i64", new_parents="*i64", bound="*fp32", failed="*i32", level="i32", beams="i32", M="i32", S="i32")

def build(kernel, signature, **constants):
    signature = signature | {name: "constexpr" for name in constants}
    source = ASTSource(kernel, {p.name: signature[p.name] for p in kernel.params}, constants)
    assert "sm_90" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

build(gpu._rank_children, RANK, stride_v=1, ROOT=True, TAIL=False, ENDS=False, PLANES=True, MODES=True, HAS_Z=False,
    P=4, SORT=16, ONE_BLOCK=False, BLOCK=512)
build(gpu._rank_children, RANK | dict(logits="*bf16"), ROOT=False, TAIL=True, ENDS=True, PLANES=True, MODES=False,
    HAS_Z=True, P=4, SORT=4, ONE_BLOCK=True, BLOCK=512)
build(gpu._keep_best, KEEP, ROOT=True, LAST=False, TAIL=False, SPANS=True, HAS_END=True, ENDS=False, P=4, SORT=8,
    BEAMS=1, KEEP=8)
build(gpu._keep_best, KEEP, ROOT=False, LAST=False, TAIL=True, SPANS=False, HAS_END=True, ENDS=True, P=4, SORT=8,
    BEAMS=4, KEEP=8)
build(gpu._keep_best, KEEP, ROOT=False, LAST=True, TAIL=True, SPANS=False, HAS_END=False, ENDS=False, P=4, SORT=8,
    BEAMS=4, KEEP=8)
"""


def test_the_kernel_compiles_for_a_real_gpu():
    done = run(["-c", COMPILE], interpret=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_gpu_machine_without_polars_builds_the_same_index(monkeypatch):
    rng = np.random.default_rng(0)
    codes, sizes = rng.integers(0, 2048, (3000, 8)), (2048,) * 8  # keys of more than one word
    codes[1000:2000] = codes[:1000]  # rows of one leaf, whose order must stay
    want = build_index(codes, codebook_sizes=sizes)
    monkeypatch.setitem(sys.modules, "polars", None)
    got = build_index(codes, codebook_sizes=sizes)
    for name, tensor in {**want.trie_tensors(), **want.item_tensors()}.items():
        np.testing.assert_array_equal({**got.trie_tensors(), **got.item_tensors()}[name], tensor, err_msg=name)


def test_without_a_gpu_and_without_the_interpreter_it_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    index = build_index(np.array([[1]]), codebook_sizes=(2,))
    with pytest.raises(ValueError, match=r"needs an index on a GPU: StaticIndex.load\(path, device='cuda'\)"):
        beam_search(Stepper([oracle.ToyModel((2,))], index), index, batch_size=1, beam_width=1, kernel="gpu")
