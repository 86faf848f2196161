"""Whole searches in buckets of fixed shapes equal those level by level: captured on a GPU, interpreted elsewhere."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the tiny model comes from transformers")
pytest.importorskip("onnx_ir", reason="the exporter needs it")

from searching import plane_of
from tiny_retriever import FIRST_TOKEN, MAX_LENGTH, VOCAB_SIZE, tiny_t5
from trieton.bundle import Bundle
from trieton.index.static_index import StaticIndex
from trieton.retriever.session import PromptTemplate, Retriever, TokenMap
from trieton.search.beam import BeamResult, beam_search
from trieton.search.captured import MAX_GRAPHS, Bucket, CapturedSearch
from trieton.search.searcher import Query, Searcher
from trieton_builder.bundle.write import write_bundle
from trieton_builder.export import export_retriever
from trieton_builder.indexing.trie import build_index

ON_GPU = torch.cuda.is_available()
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA GPU here; tests/test_kernels_gpu.py interprets these", allow_module_level=True)
DEVICE = "cuda" if ON_GPU else "cpu"
SIZES = (8, 8, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured") / "retriever"
    prompt = PromptTemplate(TokenMap.contiguous(SIZES, first=FIRST_TOKEN), max_items=10)
    export_retriever(tiny_t5(), folder, prompt, max_length=MAX_LENGTH, engine="torch")
    return folder


@pytest.fixture(scope="module")
def retriever(folder: Path) -> Retriever:
    return Retriever.open(folder, device=DEVICE)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> StaticIndex:
    codes = np.random.default_rng(0).integers(0, 8, (120, 3))
    path = tmp_path_factory.mktemp("captured") / "index.safetensors"
    build_index(codes, codebook_sizes=SIZES).save(path)
    return StaticIndex.load(path, device=DEVICE)


def prompts(rng: np.random.Generator, lengths: list[int]) -> list[np.ndarray]:
    return [rng.integers(0, VOCAB_SIZE, length) for length in lengths]


def test_one_graph_answers_batches_of_other_sizes_lengths_widths_and_planes(retriever, index):
    rng = np.random.default_rng(1)
    captured = CapturedSearch(retriever, index)
    planes = [
        plane_of(index, rng.random(index.num_leaves) < share, form) for share, form in ((0.5, "bits"), (0.1, "alive"))
    ]
    batches = [
        ([9, 16], [4, 1], None),
        ([12, 5], [3, 2], [planes[0], None]),
        ([2, 16], [4, 4], [None, planes[1]]),
    ]  # fmt: skip
    for lengths, widths, constraints in batches:
        asked = prompts(rng, lengths)
        options = {"batch_size": len(widths), "beam_width": widths, "constraints": constraints, "kernel": "gpu"}
        assert_close(captured.search(asked, widths, constraints), beam_search(retriever.start(asked), index, **options))
    assert list(captured._graphs) == [Bucket(2, 16, 4)]


def test_a_result_stays_as_it_is_when_the_graph_runs_again(retriever, index):
    rng = np.random.default_rng(2)
    captured = CapturedSearch(retriever, index)
    first = captured.search(prompts(rng, [5]), 4)
    held = {name: np.copy(getattr(first, name)) for name in ("scores", "codes", "leaves", "bound")}
    captured.search(prompts(rng, [6]), 4)
    for name, array in held.items():
        np.testing.assert_array_equal(getattr(first, name), array, err_msg=name)


def test_the_least_recently_used_graph_is_dropped(retriever, index, monkeypatch):
    monkeypatch.setattr("trieton.search.captured.MAX_GRAPHS", 2)
    assert MAX_GRAPHS > 2
    rng = np.random.default_rng(3)
    captured = CapturedSearch(retriever, index)
    for width in (4, 8, 4, 12):
        captured.search(prompts(rng, [5]), width)
    assert [bucket.beams for bucket in captured._graphs] == [4, 12]


def test_what_beam_search_refuses_is_refused(retriever, index):
    captured = CapturedSearch(retriever, index)
    with pytest.raises(ValueError, match="beam_width: expected 1 to"):
        captured.search([np.arange(3)], 0)
    with pytest.raises(ValueError, match="constraints: expected 1, one per request, got 2"):
        captured.search([np.arange(3)], 2, [None, None])
    with pytest.raises(ValueError, match="request 0"):
        captured.search([np.full(3, VOCAB_SIZE)], 2)


def test_queries_of_a_bundle_are_answered_in_one_launch(folder, tmp_path, monkeypatch):
    rng = np.random.default_rng(4)
    ids = np.arange(100, 220)
    index = build_index(rng.integers(0, 8, (120, 3)), codebook_sizes=SIZES, item_ids=ids, sets={"even": ids % 2 == 0})
    write_bundle(tmp_path / "bundle", index=index, retriever_dir=folder, provenance={})
    if not ON_GPU:
        monkeypatch.setattr(Searcher, "_captured_search", lambda self: CapturedSearch(self.retriever, self.index))
    searcher = Searcher(Bundle.open(tmp_path / "bundle", device=DEVICE), kernel="gpu")
    queries = [
        Query(ids[:3], num_results=4, beam_width=4, constraint="even"),
        Query(ids[3:9], num_results=2, beam_width=3, exclude=ids[:50]),
    ]
    answers = searcher.search(queries)
    assert searcher.totals.levels == 2 * index.num_levels
    assert searcher._captured is not None
    assert len(searcher._captured._graphs) == 1
    searcher._captured = None
    for got, want in zip(answers, searcher.search(queries), strict=True):
        np.testing.assert_array_equal(got.item_ids, want.item_ids)
        np.testing.assert_allclose(got.scores, want.scores, atol=1e-4)


def assert_close(got: BeamResult, want: BeamResult) -> None:
    """Equal lists; products of matrices of other shapes may add their floats in another order."""
    np.testing.assert_array_equal(got.num_valid, want.num_valid)
    np.testing.assert_array_equal(got.leaves, want.leaves)
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_allclose(got.scores, want.scores, atol=1e-4)
    np.testing.assert_allclose(got.bound, want.bound, atol=1e-4)


@pytest.mark.parametrize(
    ("asked", "bucket"),
    [
        ((1, 1, 1), (1, 16, 4)),
        ((3, 17, 20), (4, 32, 20)),
        ((33, 300, 70), (64, 320, 80)),
        ((8, 1000, 256), (8, 1000, 256)),
    ],
)
def test_a_bucket_is_little_larger_than_what_it_holds(asked, bucket):
    assert Bucket.of(*asked, max_length=1000) == bucket
