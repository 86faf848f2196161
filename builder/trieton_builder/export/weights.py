"""The weight files of a Hugging Face checkpoint: one whole set, in safetensors, with nothing that changes it."""

import json
from pathlib import Path

from trieton_builder.export.family import ExportError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
OTHERS = ("*.safetensors", *PICKLES, "*.h5", "*.msgpack", "*.gguf", "*.onnx")
ADAPTERS = ("adapter_config.json", "adapter_model*")
# What tools leave beside weights that they quantised; config.json has a field of its own for it.
QUANTISED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
QUANTISED_FIELDS = ("quantization_config", "compression_config")


def weight_files(folder: str | Path) -> list[Path]:
    """The weight files of a checkpoint, each checked to be there.

    Raises:
        ExportError: names the file that is missing, an adapter that is not merged, weights that are quantised, or
            a second set of weights; pickled weights are refused.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ExportError(f"{folder / 'config.json'}: missing; expected a Hugging Face checkpoint on disk")
    _refuse_changed(folder)
    single, index = folder / WEIGHTS, folder / INDEX
    named = _shards(index) if index.is_file() else []
    stray = sorted(set(folder.glob(SHARDS)) - set(named))
    if single.is_file() and (named or stray):
        other = INDEX if named else stray[0].name
        raise ExportError(f"{folder}: two sets of weights, {WEIGHTS} and {other}; keep the one that was meant")
    if named and stray:
        raise ExportError(f"{stray[0]}: {INDEX} does not name it; keep one set of weights")
    if single.is_file() or named:
        return [single] if single.is_file() else named
    if stray:
        raise ExportError(f"{index}: missing; expected it beside {stray[0].name}")
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickled:
        raise ExportError(
            f"{folder / pickled[0]}: pickled weights can run code and are refused; save the model again with "
            f"save_pretrained, which writes {WEIGHTS}"
        )
    below = _folders_with_weights(folder)
    hint = f"; there are weights in {', '.join(below)}" if below else ""
    raise ExportError(f"{single}: missing; expected the weights of the checkpoint{hint}")


def left_unread(folder: str | Path, files: list[Path]) -> list[str]:
    """Names of other weights in the folder and right below it, which an export does not read."""
    folder = Path(folder)
    beside = {path.name for pattern in OTHERS for path in folder.glob(pattern) if path.is_file()}
    return sorted(beside - {path.name for path in files}) + _folders_with_weights(folder)


def _refuse_changed(folder: Path) -> None:
    """Weights that are not what the model computes with: an adapter goes on top, or scales are missing."""
    adapters = sorted(path.name for pattern in ADAPTERS for path in folder.glob(pattern))
    if adapters:
        raise ExportError(
            f"{folder / adapters[0]}: an adapter lies beside the weights; merge the adapter first (with PEFT: "
            "model.merge_and_unload().save_pretrained(folder)), or take it away to export the base model"
        )
    quantised = sorted(path.name for pattern in QUANTISED for path in folder.glob(pattern))
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{folder / 'config.json'}: not readable ({error})") from None
    if isinstance(config, dict):
        quantised += [f"config.json: {name}" for name in QUANTISED_FIELDS if config.get(name)]
    if quantised:
        raise ExportError(
            f"{folder}/{quantised[0]}: the weights are quantised; save the model again as float32, float16 or bfloat16 "
            "weights"
        )


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"weight_map: expected names of files, got {names}")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ExportError(f"{index}: not readable ({type(error).__name__}: {error})") from None
    for name in sorted(names):
        if Path(name).name != name:
            raise ExportError(f"{index}: expected names of files beside it, got {name!r}")
        if not (index.parent / name).is_file():
            raise ExportError(f"{index.parent / name}: missing; {INDEX} names {len(names)} weight files")
    return [index.parent / name for name in sorted(names)]


def _folders_with_weights(folder: Path) -> list[str]:
    kinds = (*OTHERS, "*.bin")
    below = sorted(path for path in folder.iterdir() if path.is_dir())
    return [f"{path.name}/" for path in below if any(next(path.glob(kind), None) for kind in kinds)]
