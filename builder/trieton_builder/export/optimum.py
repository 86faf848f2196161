"""Graphs that Optimum exported, taken as they are: for models whose checkpoint is not at hand or of another family."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from torch import nn
from trieton.retriever.session import PromptTemplate, Retriever, RetrieverSpec
from trieton.retriever.spec import Framing

from trieton_builder.export.exporter import TOLERANCE, Export, refuse_samples
from trieton_builder.export.family import ExportError
from trieton_builder.export.parity import difference_by_company, largest_difference
from trieton_builder.export.said import GENERATION
from trieton_builder.export.samples import compare, read_samples
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
    check_with: str | Path | None = None,
    checkpoint: Framing | None = None,
    overwrite: bool = False,
) -> Export:
    """Make a retriever of graphs in Optimum's layout, and try it through every level.

    Args:
        model: what the graphs were made from, to compare them with; None where it is not at hand.
        check_with: a JSON Lines file of prompts to compare them with `model` on as well.
        checkpoint: what the checkpoint says about prompts, for the retriever's declaration.

    Raises:
        ExportError: no known layout, graphs that do not run with a cache, in which a prompt's scores depend on the
            others in its batch, or that differ from the model by more than float16 does, which they may have been
            made in.
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
        checkpoint=checkpoint or Framing(),
    )
    samples = None if check_with is None or model is None else read_samples(check_with, spec)
    with whole_directory(out_dir, overwrite=overwrite, mark="retriever.json") as partial:
        files = [Path(shutil.copy(folder / name, partial)) for name in _to_copy(folder, layout)]
        spec = spec.save(partial, files)
        try:
            _try(Retriever.open(partial))
        except Exception as error:  # ONNX Runtime's errors share no base class of their own
            raise ExportError(f"{folder}: the graphs do not run ({str(error).strip()[:300]})") from None
        retriever = Retriever.open(partial)
        dtype = "float16" if _holds_float16(folder / layout[-1]) else "float32"
        company = difference_by_company(retriever)
        if not company <= TOLERANCE[dtype]:
            raise ExportError(
                f"{folder}: a prompt's log-probabilities change by up to {company:.2g} with the lengths of the other "
                f"prompts in its batch, expected at most {TOLERANCE[dtype]:g} in {dtype}: attention reads places that "
                "attention_mask hides, or numbers are quantised by batch; export from the checkpoint instead"
            )
        difference = None if model is None else largest_difference(model, retriever)
        if difference is not None and not difference <= TOLERANCE["float16"]:
            raise ExportError(
                f"{folder}: the graphs' log-probabilities differ from the checkpoint's by up to {difference:.2g}, "
                f"expected at most {TOLERANCE['float16']:g}; were they made from it?"
            )
        agreement = None
        if samples and model is not None:
            agreement = compare(model, retriever, samples)
            refuse_samples(agreement, samples, check_with, "float16")
    return Export(spec, difference, agreement, company)


def _to_copy(folder: Path, layout: tuple[str, ...]) -> list[str]:
    """Names of the configs, the graphs, and the files of weights that the graphs name."""
    names = {"config.json", *layout, *([GENERATION] if (folder / GENERATION).is_file() else [])}
    for name in layout:
        for location in _locations(_load(folder / name)):
            if Path(location).name != location:
                raise ExportError(f"{folder / name}: names weights in {location!r}; expected a file beside the graph")
            if not (folder / location).is_file():
                raise ExportError(f"{folder / location}: missing, though {name} names it as its weights")
            names.add(location)
    return sorted(names)


def _load(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(str(path), load_external_data=False)
    except DecodeError as error:
        raise ExportError(f"{path}: not an ONNX graph, or not the whole of one ({error})") from None


def _locations(message: Message) -> Iterator[str]:
    """Every file of weights that a part of a model names.

    Weights may lie anywhere: in the graph, in the branches of its nodes, in their attributes, in functions.
    """
    if isinstance(message, onnx.TensorProto):
        yield from (entry.value for entry in message.external_data if entry.key == "location")
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                yield from _locations(part)


def _holds_float16(path: Path) -> bool:
    """Whether the graph computes in float16, by its cache."""
    values = [value for value in _load(path).graph.input if value.name.startswith("past_key_values.")]
    return any(value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16 for value in values)


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
