"""A real retriever for tests: an untrained T5, exported once per session, with any token map in milliseconds."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import T5Config, T5ForConditionalGeneration
from trieton.retriever.session import PromptTemplate, RetrieverSpec, TokenMap
from trieton_builder.export import export_retriever

VOCAB_SIZE = 1024
FIRST_TOKEN = 3  # behind pad, start and end
END_TOKEN = 2
MAX_LENGTH = 64


def tiny_t5(seed: int = 0) -> T5ForConditionalGeneration:
    """An untrained T5 of one encoder and one decoder layer, whose log-probabilities differ enough to rank items."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=1,
        initializer_factor=1.5,
    )
    return T5ForConditionalGeneration(config).eval()


def export_tiny_graphs(out_dir: Path) -> Path:
    """Export `tiny_t5()` (a few seconds). Use `tiny_retriever` to put other token maps over the same graphs."""
    prompt = PromptTemplate(TokenMap.contiguous((8, 8, 8), first=FIRST_TOKEN), max_items=10)
    export_retriever(tiny_t5(), out_dir, prompt, max_length=MAX_LENGTH)
    return out_dir


def tiny_retriever(
    graphs: Path, out_dir: Path, codebook_sizes: Sequence[int], *, has_end: bool = False, max_items: int = 10
) -> Path:
    """A retriever directory for any codebook sizes (at most 1,000 codes in all), over graphs exported before.

    The graphs take the tokens of a level as an input, so only the spec is new.
    """
    token_map = TokenMap.contiguous(codebook_sizes, first=FIRST_TOKEN, end_token=END_TOKEN if has_end else None)
    prompt = PromptTemplate(token_map, max_items=min(max_items, MAX_LENGTH // len(codebook_sizes)))
    shutil.copytree(graphs, out_dir)
    spec = RetrieverSpec(family="t5", vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH, prompt=prompt)
    spec.save(out_dir, list(out_dir.glob("*.onnx")))
    return out_dir
