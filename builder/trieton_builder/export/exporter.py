"""Hugging Face model -> retriever directory: graphs, spec, and the proof that they compute what the model computes."""

import copy
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from trieton.retriever.session import PromptTemplate, Retriever, RetrieverSpec
from trieton.retriever.spec import Framing

from trieton_builder.export.family import ExportError, Graphs, Limits
from trieton_builder.export.gpt2 import gpt2_graphs
from trieton_builder.export.graphs import export_onnx, export_programs
from trieton_builder.export.llama import llama_graphs
from trieton_builder.export.parity import LARGE, largest_difference, reference_logits
from trieton_builder.export.samples import Agreement, Samples, compare, read_samples
from trieton_builder.export.t5 import t5_graphs
from trieton_builder.files.whole_directory import whole_directory

FAMILIES: dict[str, Callable[[nn.Module, Limits, str], Graphs]] = {
    "t5": t5_graphs,
    "gpt2": gpt2_graphs,
    "llama": llama_graphs,
    "mistral": llama_graphs,
    "qwen2": llama_graphs,
    "qwen3": llama_graphs,
}
# Largest difference of a log-probability that is accepted, by the type that the graphs compute in; float32 graphs of
# random models stay below 1e-5.
TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
ENGINES = ("onnx", "torch")  # that an export can make graphs for
_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SPARE = 64 << 20  # bytes of disk beside the weights: graphs, spec, what others write meanwhile


@dataclass(frozen=True)
class Export:
    """What an export made.

    Attributes:
        spec: the retriever's declaration with its fingerprint.
        largest_difference: of any log-probability from the PyTorch model's, over random prompts; None when not checked.
        agreement: with the PyTorch model on the prompts of `check_with`; None without them.
        by_company: adopted graphs only: the largest difference between a prompt alone and in a batch of others.
    """

    spec: RetrieverSpec
    largest_difference: float | None
    agreement: Agreement | None = None
    by_company: float | None = None


def export_retriever(
    model: nn.Module,
    out_dir: str | Path,
    prompt: PromptTemplate,
    *,
    max_length: int | None = None,
    normalise: str = "vocabulary",
    dtype: str = "float32",
    engine: str = "onnx",
    check: bool = True,
    check_with: str | Path | None = None,
    checkpoint: Framing | None = None,
    overwrite: bool = False,
) -> Export:
    """Export `model` into the directory `out_dir`, which appears whole or not at all.

    Args:
        model: a Hugging Face model of a supported family; it is read, not changed.
        prompt: how a history becomes a prompt, with the token map.
        max_length: prompt tokens at most; by default what the template can make.
        normalise: "vocabulary" for log-probabilities of the whole model; "level" to run the head over the level's codes
            only, cheaper for a large vocabulary, but its scores are then not the model's.
        dtype: of weights, keys and values: "float32", "float16" or "bfloat16". ONNX Runtime has few bfloat16 kernels:
            for it "bfloat16" halves the file, and weights are widened to float32 when they are loaded.
        engine: "onnx" for ONNX Runtime, "torch" for programs of `torch.export`.
        check: compare the graphs with the model (its weights rounded to `dtype`) on random prompts.
        check_with: a JSON Lines file of prompts to compare them on as well, see `trieton_builder.export.samples`.
        checkpoint: what the checkpoint says about prompts, for the retriever's declaration.
        overwrite: replace `out_dir` where it exists.

    Raises:
        ExportError: a family, dtype or engine that is not supported, weights that are no numbers or none in `dtype`, a
            model that does not run, too little disk, or graphs that differ from the model by more than the tolerance.
        ValueError: a token map or template that does not fit the model or the prompts of `check_with`.
        FileExistsError: `out_dir` exists and `overwrite` is not set.
    """
    out_dir, config = Path(out_dir), model.config
    if out_dir.exists() and not overwrite:
        raise FileExistsError(f"{out_dir}: exists already; remove it or ask to overwrite it")
    if config.model_type not in FAMILIES:
        raise ExportError(f"model type {config.model_type!r}: not supported; expected one of {', '.join(FAMILIES)}")
    if dtype not in TOLERANCE:
        raise ExportError(f"dtype: expected one of {', '.join(TOLERANCE)}, got {dtype!r}")
    if engine not in ENGINES:
        raise ExportError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    start = getattr(config, "decoder_start_token_id", None) if config.is_encoder_decoder else None
    spec = RetrieverSpec(
        family=config.model_type,
        vocab_size=model.get_input_embeddings().num_embeddings,
        max_length=max_length or prompt.longest,
        prompt=prompt,
        engine=engine,
        dtype=dtype,
        normalise=normalise,
        checkpoint=checkpoint or Framing(start_token=start if type(start) is int else None),
    )
    samples = None if check_with is None else read_samples(check_with, spec)
    limits = Limits(spec.max_length, spec.num_levels)
    rounded = _rounded(model, dtype)
    computed = "float32" if engine == "onnx" and dtype == "bfloat16" else dtype
    traced = rounded if computed == "float32" else _cast(copy.deepcopy(rounded), _TORCH[computed])
    graphs = FAMILIES[config.model_type](traced, limits, normalise)
    _try_model(rounded, dtype)
    _check_disk(next(folder for folder in out_dir.absolute().parents if folder.exists()), model, dtype)
    with whole_directory(out_dir, overwrite=overwrite, mark="retriever.json") as partial:
        if engine == "onnx":
            narrow = dtype != computed
            files = export_onnx(graphs, limits, partial, dtype=_TORCH[computed], store_bfloat16=narrow)
        else:
            files = export_programs(graphs, limits, partial, dtype=_TORCH[computed])
        spec = spec.save(partial, files)
        retriever = Retriever.open(partial) if check or samples else None
        difference = largest_difference(rounded, retriever) if check and retriever else None
        if difference is not None:
            refuse_beyond(difference, computed)
        agreement = None
        if samples and retriever:
            agreement = compare(rounded, retriever, samples)
            refuse_samples(agreement, samples, check_with, computed)
    return Export(spec, difference, agreement)


def refuse_beyond(difference: float, dtype: str, where: str = "") -> None:
    """Raise ExportError for a largest difference beyond what `dtype` accounts for; `where` begins its text."""
    if difference <= TOLERANCE[dtype]:
        return
    if math.isnan(difference):
        raise ExportError(
            f"{where}the graphs' log-probabilities are not numbers in {dtype}, where the model's own activations "
            "outgrow it; export with another dtype"
        )
    raise ExportError(
        f"{where}the graphs' log-probabilities differ from the model's by up to {difference:.2g}, "
        f"expected at most {TOLERANCE[dtype]:g} in {dtype} (for logits beyond {LARGE:g}: times largest / {LARGE:g})"
    )


def refuse_samples(agreement: Agreement, samples: Samples, path: str | Path | None, dtype: str) -> None:
    """The same for a user's prompts; names the line of the worst."""
    refuse_beyond(agreement.largest_difference, dtype, f"{path}: line {samples.lines[agreement.worst]}: ")


def _rounded(model: nn.Module, dtype: str) -> nn.Module:
    """The model in float32 and evaluation mode, its weights rounded to `dtype`; a copy where that changes anything."""
    held = {parameter.dtype for parameter in model.parameters()}
    if dtype == "float32" and held == {torch.float32} and not model.training:
        return model
    return _cast(_cast(copy.deepcopy(model), _TORCH[dtype]), torch.float32).eval()


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with its weights in `dtype`, in place. Not its buffers: rotary frequencies are used in float32 always,
    and half of their digits would turn a token at position 500 by a radian."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _try_model(model: nn.Module, dtype: str) -> None:
    """Run the model itself on one token: what it cannot do, its graphs cannot."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ExportError(f"{name}: weights that are not finite numbers in {dtype}")
    token = torch.zeros(1, dtype=torch.int64)
    try:
        reference_logits(model, token, token[None, :0])
    except Exception as error:  # whatever a class of transformers raises for a config that it took, but cannot run
        raise ExportError(f"the model itself does not run: {type(error).__name__}: {error}") from None


def _check_disk(folder: Path, model: nn.Module, dtype: str) -> None:
    # Both graphs hold the weights they use: at most the whole model each.
    needed = 2 * sum(p.numel() for p in model.parameters()) * _TORCH[dtype].itemsize + _SPARE
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ExportError(f"{folder}: {free / 1e9:.1f} GB free, the export needs up to {needed / 1e9:.1f} GB")
