"""The exported retriever against the Hugging Face model it came from."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import hugging_face
import numpy as np
import pytest
import torch
from tiny_retriever import VOCAB_SIZE, tiny_t5
from trieton.retriever.session import Retriever
from trieton.search.beam import beam_search
from trieton_builder.export.parity import largest_difference
from trieton_builder.indexing.trie import build_index

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SIZES = (8, 8, 8)


@pytest.fixture(scope="module")
def retriever(tiny_retriever_dir: Path) -> Retriever:
    return Retriever.open(tiny_retriever_dir)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_t5()


def test_log_probabilities_equal_the_models_with_beams_reordered_at_every_level(retriever, model):
    assert max(largest_difference(model, retriever, seed=seed) for seed in range(3)) < 2e-5


def test_a_prompt_gets_the_same_logits_alone_and_padded_in_a_batch(retriever):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB_SIZE, n) for n in (5, 64, 1, 33)]
    codes, parents = rng.integers(0, 8, (4, 6)), np.zeros((4, 6), np.int64)
    together = retriever.start(prompts)
    batch = [together(0, None, None), together(1, codes, parents)]
    for b, prompt in enumerate(prompts):
        alone = retriever.start([prompt])
        for level, step in enumerate([alone(0, None, None), alone(1, codes[b : b + 1], parents[b : b + 1])]):
            for mine, theirs in zip(step, batch[level], strict=True):
                np.testing.assert_allclose(mine[0], theirs[b], atol=2e-5)


def test_dead_beams_are_carried_without_touching_the_others(retriever):
    prompt = [np.arange(5, 20)]
    whole, with_dead = retriever.start(prompt), retriever.start(prompt)
    whole(0, None, None), with_dead(0, None, None)
    codes, parents = np.array([[3, 1, 4]]), np.array([[0, 0, 0]])
    want, _ = whole(1, codes, parents)
    got, log_z = with_dead(1, np.array([[3, 1, -1]], np.int32), np.array([[0, 0, -1]], np.int32))
    np.testing.assert_array_equal(got[:, :2], want[:, :2])
    assert np.isfinite(got).all()
    assert np.isfinite(log_z).all()


def test_a_torch_kernel_may_hand_over_its_tensors(retriever):
    prompt = [np.arange(5, 20)]
    by_numpy, by_torch = retriever.start(prompt), retriever.start(prompt)
    by_numpy(0, None, None), by_torch(0, None, None)
    codes, parents = np.array([[3, 1]]), np.array([[0, 0]])
    want, _ = by_numpy(1, codes, parents)
    got, _ = by_torch(1, torch.from_numpy(codes), torch.from_numpy(parents))
    np.testing.assert_array_equal(got, want)


def test_the_end_code_is_one_more_column_at_every_level_but_the_first(make_tiny_retriever, model):
    retriever = Retriever.open(make_tiny_retriever((4, 5, 6), has_end=True))
    session = retriever.start([np.arange(3, 12)])
    widths = [session(0, None, None)[0].shape[-1]]
    widths += [session(level, np.zeros((1, 2), np.int64), np.zeros((1, 2), np.int64))[0].shape[-1] for level in (1, 2)]
    assert widths == [4, 6, 7]
    assert largest_difference(model, retriever) < 2e-5


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (np.array([], np.int64), "request 1: expected 1 to 64 tokens, got 0"),
        (np.zeros(65, np.int64), "request 1: expected 1 to 64 tokens, got 65"),
        (np.array([3, -1]), "request 1: expected tokens 0 <= token < 1024, got -1 at place 1"),
        (np.array([1024]), "request 1: expected tokens 0 <= token < 1024, got 1024 at place 0"),
        (np.array([1.5]), "request 1: expected a flat list of integers, got float64"),
        (np.array([[1]]), "request 1: expected a flat list of integers"),
    ],
)
def test_a_bad_prompt_is_refused_and_named(retriever, prompt, text):
    with pytest.raises(ValueError, match=text):
        retriever.start([np.array([3]), prompt])


def test_levels_are_asked_for_in_order(retriever):
    session = retriever.start([np.array([3])])
    with pytest.raises(ValueError, match="expected level 0 next, got 1"):
        session(1, np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64))


def test_a_session_restarts_for_some_of_its_requests(retriever):
    rng = np.random.default_rng(3)
    session = retriever.start([rng.integers(0, VOCAB_SIZE, n) for n in (40, 5, 9)])
    first, _ = session(0, None, None)
    again, _ = session.restart(np.array([1, 2]))(0, None, None)
    np.testing.assert_allclose(again, first[1:], atol=2e-5)


def test_a_folder_without_a_retriever_is_refused(tmp_path, tiny_retriever_dir):
    with pytest.raises(ValueError, match=r"retriever\.json: not a usable retriever"):
        Retriever.open(tmp_path)
    (tmp_path / "retriever.json").write_bytes((tiny_retriever_dir / "retriever.json").read_bytes())
    with pytest.raises(ValueError, match=r"prefill\.onnx: ONNX Runtime cannot load it"):
        Retriever.open(tmp_path)
    (tmp_path / "prefill.onnx").write_bytes(b"no graph")
    with pytest.raises(ValueError, match=r"prefill\.onnx: ONNX Runtime cannot load it"):
        Retriever.open(tmp_path)


@pytest.mark.case("B12")
@pytest.mark.parametrize("seed", range(4))
def test_beam_search_returns_what_hugging_face_generates_under_the_same_prefixes(retriever, model, seed):
    rng = np.random.default_rng(seed)
    everything = np.array(list(itertools.product(*map(range, SIZES))))
    codes = everything[rng.choice(len(everything), 120, replace=False)]
    prompts = [rng.integers(0, VOCAB_SIZE, n) for n in (7, 30, 64)]
    index = build_index(codes, codebook_sizes=SIZES)
    found = beam_search(retriever.start(prompts), index, batch_size=len(prompts), beam_width=12)
    for b, prompt in enumerate(prompts):
        sequences, scores = hugging_face.beam_search(model, prompt, codes, retriever.spec.token_map, 12)
        assert [tuple(row) for row in found.codes[b].tolist()] == sequences
        np.testing.assert_allclose(found.scores[b], scores, atol=1e-4)


def test_onnx_runtime_is_told_to_send_nothing_to_its_makers(tmp_path):
    """It would also leave a file, by which this is seen."""
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    code = "import trieton.retriever.onnx, onnxruntime, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    command = [sys.executable, "-c", code]
    environment["TMPDIR"] = str(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "1\n"
    assert list(tmp_path.iterdir()) == []
