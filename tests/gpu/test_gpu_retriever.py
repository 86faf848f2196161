"""The torch.export engine on an accelerator: the model's numbers, and a whole pass captured in a CUDA graph."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the tiny model comes from transformers")
pytest.importorskip("onnx_ir", reason="the exporter needs it")

from tiny_retriever import FIRST_TOKEN, VOCAB_SIZE, tiny_t5
from trieton.retriever.session import PromptTemplate, Retriever, TokenMap
from trieton.retriever.torch_export import TorchEngine
from trieton_builder.export import export_retriever
from trieton_builder.export.parity import largest_difference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PROMPT = PromptTemplate(TokenMap.contiguous((8, 8, 8), first=FIRST_TOKEN), max_items=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "retriever"
    export_retriever(tiny_t5(), folder, PROMPT, engine="torch")
    return folder


def test_an_accelerator_computes_what_the_model_computes(folder):
    retriever = Retriever.open(folder, device="cuda")
    assert largest_difference(tiny_t5(), retriever) < 1e-3
    logits, log_z = retriever.start([np.arange(3, 9)])(0, None, None)
    assert logits.is_cuda
    assert log_z.is_cuda


def test_a_whole_pass_can_be_captured_in_a_cuda_graph_and_replayed_on_other_prompts(folder):
    engine = TorchEngine.open(folder, device="cuda")
    columns = PROMPT.token_map.columns
    batch, length, beams = 4, 24, 16
    rng = np.random.default_rng(0)
    first, second = (torch.from_numpy(rng.integers(0, VOCAB_SIZE, (batch, length))).cuda() for _ in range(2))
    codes, parents = (torch.from_numpy(rng.integers(0, 8, (batch, beams))).cuda() for _ in range(2))
    nobody = torch.zeros_like(parents)
    ids, mask = first.clone(), torch.ones_like(first)

    def whole_pass() -> list[torch.Tensor]:
        logits, log_z, state = engine.prefill(ids, mask, columns[0])
        found = [logits, log_z]
        for level, chosen in ((1, nobody), (2, parents)):
            found += engine.decode(state, *engine.beams(columns[level - 1], codes, chosen), columns[level])
        return found

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            whole_pass()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = whole_pass()
    for prompt in (first, second):
        ids.copy_(prompt)
        graph.replay()
        for mine, wanted in zip(captured, whole_pass(), strict=True):
            torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)
