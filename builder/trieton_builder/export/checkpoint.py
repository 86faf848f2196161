"""Hugging Face checkpoints on disk: read with safetensors only, complete, without running anyone's code."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trieton_builder.export.family import ExportError
from trieton_builder.export.said import read_said
from trieton_builder.export.weights import weight_files

OLD = ".masked_bias"  # a constant that older releases saved with GPT-2
FLOATS = ("F64", "F32", "F16", "BF16")
HEAD = "lm_head.weight"


def load_checkpoint(folder: str | Path, families: dict[str, Any]) -> nn.Module:
    """The model of a checkpoint, float32, in evaluation mode.

    Args:
        families: supported model types.

    Raises:
        ExportError: an architecture that is not supported, or weights that are missing, left over, quantised or of
            another shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from trieton_builder.export.quiet import no_bars

    files = weight_files(folder)
    try:
        kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExportError(f"{Path(folder) / 'config.json'}: expected a model_type ({error})") from None
    if not isinstance(kind, str) or kind not in families:
        raise ExportError(f"{folder}: model type {kind!r} is not supported; expected one of {', '.join(families)}")
    try:
        with no_bars():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
            model, report = auto.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # so that the report below can name them
                output_loading_info=True,
            )
    except Exception as error:  # whatever transformers and safetensors raise on a damaged file
        raise ExportError(
            f"{folder}: not loadable ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        ) from None
    # transformers would fill these with random numbers and only warn.
    wrong = sorted(report["missing_keys"]) + sorted(
        f"{name} ({list(held)} in the file, {list(wanted)} by config.json)"
        for name, held, wanted in report["mismatched_keys"]
    )
    if wrong:
        raise ExportError(f"{folder}: {len(wrong)} weights are missing or have another shape, the first is {wrong[0]}")
    # And leave these out: layers beyond those of the config, biases that it denies.
    extra = sorted(key for key in report["unexpected_keys"] if not key.endswith(OLD))
    if extra:
        raise ExportError(
            f"{folder}: {len(extra)} weights have no place in the {kind} model of config.json, the first is "
            f"{extra[0]}; save it again by its class"
        )
    if config.is_encoder_decoder and model.config.decoder_start_token_id is None:
        model.config.decoder_start_token_id = read_said(folder).start_token  # generation_config.json may name it alone
    held = _held(files)
    _refuse_integers(held, [name for name, _ in model.named_parameters()])
    _refuse_two_heads(folder, model, HEAD in held)
    return model.eval()


def _held(files: list[Path]) -> dict[str, tuple[Path, str]]:
    """The file and type of every tensor."""
    from safetensors import safe_open

    held: dict[str, tuple[Path, str]] = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            held |= {name: (file, weights.get_slice(name).get_dtype()) for name in weights.offset_keys()}
    return held


def _refuse_integers(held: dict[str, tuple[Path, str]], parameters: list[str]) -> None:
    """Quantised weights without the scales that make numbers of them would be taken for numbers."""
    for name, (file, dtype) in held.items():
        # Masks, which older releases saved, are nobody's parameters. A body may be saved without its prefix.
        if dtype not in FLOATS and any(f".{parameter}".endswith(f".{name}") for parameter in parameters):
            raise ExportError(f"{file}: {name}: expected weights of {', '.join(FLOATS)}, got {dtype}")


def _refuse_two_heads(folder: str | Path, model: nn.Module, has_head: bool) -> None:
    """A head that config.json ties to the embeddings and the file does not, or the other way round.

    Releases of transformers differ in which of the two they believe.
    """
    fields = json.loads((Path(folder) / "config.json").read_bytes())
    tied = fields.get("tie_word_embeddings", model.config.tie_word_embeddings)
    # Since 5.x a T5 always says tied; whether it is scaled, as tied ones are, stands in a field of its own.
    tied = tied and fields.get("scale_decoder_outputs") is None
    alike = torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)
    if tied and has_head and not alike:
        raise ExportError(
            f"{folder}: config.json ties the head to the embeddings (tie_word_embeddings), but the weights hold a "
            f"{HEAD} of its own; set tie_word_embeddings to what the model was trained with"
        )
    if not fields.get("tie_word_embeddings", True) and not has_head:
        raise ExportError(f"{folder}: config.json does not tie the head to the embeddings, but {HEAD} is missing")
