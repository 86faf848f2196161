"""A retriever that lives in the server as two models of its own, called from inside a search (BLS).

For people whose retriever is served already: TensorRT, the ONNX backend, or a Python model. The models have the tensors
of the exported graphs (see `trieton.retriever`), no batching of their own (max_batch_size 0), and are pinned to the
versions that the bundle names, so that a search never mixes two of them. Each level costs one hop through the server.

    retriever/models.json    {"prefill": {"model": name, "version": n, "outputs": [...]}, "decode": {...}}
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trieton.retriever.onnx import host

MODELS_FILE = "models.json"


@dataclass(frozen=True)
class AskedModel:
    """A model of the server, the one version of it that is asked, and the names of its outputs."""

    name: str
    version: int
    outputs: tuple[str, ...]


def read_models(folder: Path) -> tuple[AskedModel, AskedModel]:
    """The models for prefill and decode that `models.json` of a retriever names. Raises ValueError."""
    file = folder / MODELS_FILE
    try:
        given = json.loads(file.read_text())
        prefill, decode = (_asked(graph, given[graph]) for graph in ("prefill", "decode"))
        if not any(name.startswith("present.") for name in decode.outputs):
            raise ValueError(f"decode: outputs: expected names with 'present.' among them, got {decode.outputs}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not usable ({type(error).__name__}: {error})") from None
    return prefill, decode


def _asked(graph: str, entry: Any) -> AskedModel:
    name, version, outputs = entry["model"], entry["version"], entry["outputs"]
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"{graph}: model: expected a name, got {name!r}")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:  # -1 would be whichever is newest
        raise ValueError(f"{graph}: version: expected a number from 1, got {version!r}")
    if not isinstance(outputs, list) or not {"logits", "log_z"} <= set(outputs):
        raise ValueError(f"{graph}: outputs: expected names with 'logits' and 'log_z' among them, got {outputs!r}")
    return AskedModel(name, version, tuple(map(str, outputs)))


class BlsEngine:
    """Asks the models that `models.json` names. Works only inside the server, while it executes a request."""

    def __init__(self, folder: Path):
        """Raises ValueError: no usable models.json, or not inside the server."""
        self._prefill, self._decode = read_models(folder)
        try:
            import triton_python_backend_utils as pb_utils
        except ImportError:
            raise ValueError("engine bls: this retriever is a model of the server and can run nowhere else") from None
        self._pb_utils = pb_utils
        self._prefix = [name for name in self._prefill.outputs if name.startswith("prefix.")]
        present = [name for name in self._decode.outputs if name.startswith("present.")]
        self._past = {name: name.replace("present.", "past_key_values.", 1) for name in present}
        self._first_suffix = present[0] in self._prefill.outputs

    def prefill(
        self, input_ids: np.ndarray, attention_mask: np.ndarray, level_tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """int64 [B, S], int64 [B, S], int64 [W] -> logits float32 [B, 1, W], log_z float32 [B, 1], state."""
        mask = self._tensor("attention_mask", attention_mask)
        inputs = [self._tensor("input_ids", input_ids), mask, self._tensor("level_tokens", level_tokens)]
        out = self._ask(self._prefill, inputs)
        state = {"attention_mask": mask} | {name: out[name] for name in self._prefix}
        for place, (present, past) in enumerate(self._past.items()):
            if self._first_suffix:
                state[past] = self._renamed(past, out[present])
            else:
                prefix = _array(out[self._prefix[place]])  # [B, G, S, D]
                empty = np.zeros((len(prefix), 1, prefix.shape[1], 0, prefix.shape[3]), prefix.dtype)
                state[past] = self._tensor(past, empty)
        return _array(out["logits"]), _array(out["log_z"]), state

    def decode(
        self, state: dict[str, Any], input_ids: np.ndarray, parents: np.ndarray, level_tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """int64 [B, M], int64 [B, M], int64 [W] -> logits float32 [B, M, W], log_z float32 [B, M]; grows `state`."""
        own = {"input_ids": input_ids, "parents": parents, "level_tokens": level_tokens}
        inputs = [*(self._tensor(name, array) for name, array in own.items()), *state.values()]
        out = self._ask(self._decode, inputs)
        for present, past in self._past.items():
            state[past] = self._renamed(past, out[present])
        return _array(out["logits"]), _array(out["log_z"])

    def beams(self, table: np.ndarray, codes: Any, parents: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens `table[codes]` and parents int64 [B, M], dead beams at the first of each."""
        return table.take(host(codes), mode="clip"), np.maximum(host(parents), 0).astype(np.int64, copy=False)

    def _ask(self, model: "AskedModel", inputs: list[Any]) -> dict[str, Any]:
        request = self._pb_utils.InferenceRequest(
            model_name=model.name,
            model_version=model.version,
            requested_output_names=list(model.outputs),
            inputs=inputs,
        )
        response = request.exec()
        if response.has_error():
            raise RuntimeError(f"model {model.name}, version {model.version}: {response.error().message()}")
        return {tensor.name(): tensor for tensor in response.output_tensors()}

    def _tensor(self, name: str, array: np.ndarray) -> Any:
        return self._pb_utils.Tensor(name, np.ascontiguousarray(array))

    def _renamed(self, name: str, tensor: Any) -> Any:
        return self._pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack())  # the memory stays where it is


def _array(tensor: Any) -> np.ndarray:
    if tensor.is_cpu():
        return tensor.as_numpy()
    import torch  # a model on a GPU answers there

    return torch.utils.dlpack.from_dlpack(tensor.to_dlpack()).cpu().numpy()
