"""Hugging Face checkpoints on disk: read with safetensors only, complete, without running anyone's code."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trieton_builder.export.family import ExportError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD = ".masked_bias"  # a constant that older releases saved with GPT-2
FLOATS = ("F64", "F32", "F16", "BF16")
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def weight_files(folder: str | Path) -> list[Path]:
    """The weight files of a checkpoint, each checked to be there.

    Raises:
        ExportError: names the file that is missing; pickled weights are refused.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ExportError(f"{folder / 'config.json'}: missing; expected a Hugging Face checkpoint on disk")
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
            if not names or not all(isinstance(name, str) for name in names):
                raise ValueError(f"weight_map: expected names of files, got {names}")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ExportError(f"{folder / INDEX}: not readable ({type(error).__name__}: {error})") from None
        missing = [name for name in sorted(names) if not (folder / name).is_file()]
        if missing:
            raise ExportError(f"{folder / missing[0]}: missing; {INDEX} names {len(names)} weight files")
        return [folder / name for name in sorted(names)]
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickled:
        raise ExportError(
            f"{folder / pickled[0]}: pickled weights can run code and are refused; save the model again with "
            f"save_pretrained, which writes {WEIGHTS}"
        )
    raise ExportError(f"{folder / WEIGHTS}: missing; expected the weights of the checkpoint")


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
    _refuse_integers(files, [name for name, _ in model.named_parameters()])
    return model.eval()


def _refuse_integers(files: list[Path], parameters: list[str]) -> None:
    """Quantised weights without the scales that make numbers of them would be taken for numbers."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.offset_keys():
                dtype = weights.get_slice(name).get_dtype()
                # Masks, which older releases saved, are nobody's parameters. A body may be saved without its prefix.
                if dtype not in FLOATS and any(f".{parameter}".endswith(f".{name}") for parameter in parameters):
                    raise ExportError(f"{file}: {name}: expected weights of {', '.join(FLOATS)}, got {dtype}")
