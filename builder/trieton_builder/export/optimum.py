"""Graphs that Optimum exported, taken as they are: for models whose checkpoint is not at hand or of another family."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from torch import nn
from trieton.retriever.session import PromptTemplate, Retriever, RetrieverSpec

from trieton_builder.export.exporter import TOLERANCE, Export
from trieton_builder.export.family import ExportError
from trieton_builder.export.parity import largest_difference
from trieton_builder.files.whole_directory import whole_directory

LAYOUTS = (
    ("encoder_model.onnx", "decoder_model_merged.onnx"),
    ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"),
    ("model.onnx",),
)


def adopt_optimum(
    folder: str | Path,
    out_dir: str | Path,
    prompt: PromptTemplate,
    *,
    model: nn.Module | None = None,
    max_length: int | None = None,
    normalise: str = "vocabulary",
    overwrite: bool = False,
) -> Export:
    """Make a retriever of graphs in Optimum's layout, and try it through every level.

    Args:
        model: what the graphs were made from, to compare them with; None where it is not at hand.

    Raises:
        ExportError: no known layout, graphs that do not run with a cache, or that differ from the model by more than
            float16 does, which they may have been made in.
        ValueError: a token map or template that does not fit the vocabulary in config.json.
        FileExistsError: `out_dir` exists and `overwrite` is not set.
    """
    folder = Path(folder)
    layout = next((names for names in LAYOUTS if all((folder / name).is_file() for name in names)), None)
    if layout is None:
        known = "; ".join(" + ".join(names) for names in LAYOUTS)
        raise ExportError(f"{folder}: no graphs in Optimum's layout; expected {known}")
    try:
        config = json.loads((folder / "config.json").read_text())
        vocab_size, family = config["vocab_size"], config["model_type"]
        if type(vocab_size) is not int or not isinstance(family, str):
            raise ValueError(f"got {vocab_size!r} and {family!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExportError(f"{folder / 'config.json'}: expected vocab_size and model_type ({error})") from None
    spec = RetrieverSpec(
        family=family,
        vocab_size=vocab_size,
        max_length=max_length or prompt.longest,
        prompt=prompt,
        engine="optimum",
        normalise=normalise,
    )
    with whole_directory(out_dir, overwrite=overwrite, mark="retriever.json") as partial:
        files = [Path(shutil.copy(folder / name, partial)) for name in ("config.json", *_with_data(folder, layout))]
        spec = spec.save(partial, files)
        try:
            _try(Retriever.open(partial))
        except Exception as error:  # ONNX Runtime's errors share no base class of their own
            raise ExportError(f"{folder}: the graphs do not run ({str(error).strip()[:300]})") from None
        difference = None if model is None else largest_difference(model, Retriever.open(partial))
        if difference is not None and not difference <= TOLERANCE["float16"]:
            raise ExportError(
                f"{folder}: the graphs' log-probabilities differ from the checkpoint's by up to {difference:.2g}, "
                f"expected at most {TOLERANCE['float16']:g}; were they made from it?"
            )
    return Export(spec, difference)


def _with_data(folder: Path, layout: tuple[str, ...]) -> list[str]:
    """The graphs and the files of weights that they name."""
    names = set(layout)
    for name in layout:
        try:
            graph = onnx.load(str(folder / name), load_external_data=False).graph
        except DecodeError as error:
            raise ExportError(f"{folder / name}: not an ONNX graph, or not the whole of one ({error})") from None
        for tensor in graph.initializer:
            names |= {entry.value for entry in tensor.external_data if entry.key == "location"}
    missing = [name for name in sorted(names) if not (folder / name).is_file() or Path(name).name != name]
    if missing:
        raise ExportError(f"{folder / missing[0]}: missing, though a graph names it as its weights")
    return sorted(names)


def _try(retriever: Retriever) -> None:
    """Two prompts of different lengths through every level; wrong inputs show here, not at the first request.

    Among them the last token of the vocabulary, which the graphs lack where config.json is another model's.
    """
    spec = retriever.spec
    session = retriever.start([np.full(1, spec.vocab_size - 1), np.zeros(spec.max_length, np.int64)])
    codes = parents = None
    for level in range(spec.num_levels):
        logits, log_z = session(level, codes, parents)
        if logits.shape[-1] != len(spec.token_map.columns[level]) or not np.isfinite(log_z).all():
            raise ExportError(f"level {level}: expected finite logits, got shape {logits.shape}")
        codes = parents = np.zeros((2, 2), np.int64)
