"""Hugging Face model -> retriever directory: graphs, spec, and the proof that they compute what the model computes."""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from trieton.retriever import PromptTemplate, Retriever, RetrieverSpec

from trieton_builder.export.family import ExportError, Graphs, Limits
from trieton_builder.export.gpt2 import gpt2_graphs
from trieton_builder.export.graphs import export_graphs
from trieton_builder.export.llama import llama_graphs
from trieton_builder.export.parity import largest_difference
from trieton_builder.export.t5 import t5_graphs

TOLERANCE = 1e-3  # of a log-probability; float32 graphs of random models stay below 1e-5


FAMILIES: dict[str, Callable[[nn.Module, Limits, str], Graphs]] = {
    "t5": t5_graphs,
    "gpt2": gpt2_graphs,
    "llama": llama_graphs,
    "mistral": llama_graphs,
    "qwen2": llama_graphs,
    "qwen3": llama_graphs,
}


@dataclass(frozen=True)
class Export:
    """What an export made.

    Attributes:
        spec: the retriever's declaration with its fingerprint.
        largest_difference: of any log-probability from the PyTorch model's, over random prompts; None when not checked.
    """

    spec: RetrieverSpec
    largest_difference: float | None


def export_retriever(
    model: nn.Module,
    out_dir: str | Path,
    prompt: PromptTemplate,
    *,
    max_length: int | None = None,
    normalise: str = "vocabulary",
    check: bool = True,
    overwrite: bool = False,
) -> Export:
    """Export `model` into the directory `out_dir`, which appears whole or not at all.

    Args:
        model: a Hugging Face model of a supported family; its parameters are read, not changed.
        prompt: how a history becomes a prompt, with the token map.
        max_length: prompt tokens at most; by default what the template can make.
        normalise: "vocabulary" for log-probabilities of the whole model; "level" to run the head over the level's codes
            only, cheaper for a large vocabulary, but its scores are then not the model's.
        check: compare the graphs with the model on random prompts.
        overwrite: replace `out_dir` where it exists.

    Raises:
        ExportError: a family that is not supported, or graphs that differ from the model by more than the tolerance.
        ValueError: a token map or template that does not fit the model.
        FileExistsError: `out_dir` exists and `overwrite` is not set.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and not overwrite:
        raise FileExistsError(f"{out_dir}: exists already; remove it or ask to overwrite it")
    config = model.config
    if config.model_type not in FAMILIES:
        raise ExportError(f"model type {config.model_type!r}: not supported; expected one of {', '.join(FAMILIES)}")
    spec = RetrieverSpec(
        family=config.model_type,
        vocab_size=config.vocab_size,
        max_length=max_length or prompt.longest,
        prompt=prompt,
        normalise=normalise,
    )
    limits = Limits(spec.max_length, spec.num_levels)
    training = model.training
    model.eval()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.partial-", dir=out_dir.parent))
    try:
        graphs = FAMILIES[config.model_type](model, limits, normalise)
        files = export_graphs(graphs, limits, partial, torch.float32)
        spec = spec.save(partial, files)
        difference = largest_difference(model, Retriever.open(partial)) if check else None
        if difference is not None and not difference <= TOLERANCE:
            raise ExportError(
                f"the graphs' log-probabilities differ from the model's by up to {difference:.2g}, "
                f"expected at most {TOLERANCE:g}"
            )
        partial.chmod(0o755)  # mkdtemp makes it private
        if out_dir.exists():
            shutil.rmtree(out_dir)
        os.replace(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        model.train(training)
    return Export(spec, difference)
