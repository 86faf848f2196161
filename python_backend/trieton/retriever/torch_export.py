"""The exported graphs as `torch.export` programs: the engine for accelerators without ONNX Runtime's CUDA build.

Everything stays on the device: logits go to the kernel, and its codes and parents come back, as device tensors.
"""

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export.passes import move_to_device_pass

from trieton.resources import usable_cores

KeyValue = tuple[Tensor, Tensor]


class TorchEngine:
    """`prefill` and `decode` as callables over tensors. Safe to call from several threads."""

    def __init__(self, prefill: Callable[..., Any], decode: Callable[..., Any], *, device: str | torch.device = "cpu"):
        """Take the two graphs as exported programs' modules, or as any callables of the same inputs and outputs."""
        self._prefill, self._decode = prefill, decode
        self.device = torch.device(device)
        self._tables: dict[int, tuple[np.ndarray, Tensor]] = {}

    @classmethod
    def open(cls, folder: Path, *, threads: int | None = None, device: str | None = None) -> "TorchEngine":
        """Load `prefill.pt2` and `decode.pt2`, onto the accelerator where there is one.

        Args:
            threads: threads of an operator on the CPU; PyTorch has one number for the whole process. None leaves it,
                or lowers it to the cores that this process may use.
            device: "cpu" or "cuda"; None takes CUDA where PyTorch finds it.

        Raises:
            ValueError: a program is missing, not readable, or carries pickled objects.
        """
        torch.set_num_threads(threads or min(torch.get_num_threads(), usable_cores()))
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(_program(folder / "prefill.pt2", chosen), _program(folder / "decode.pt2", chosen), device=chosen)

    @torch.inference_mode()
    def prefill(
        self, input_ids: Any, attention_mask: Any, level_tokens: np.ndarray
    ) -> tuple[Tensor, Tensor, "TorchState"]:
        """int64 [B, S], int64 [B, S], int64 [W] -> logits float32 [B, 1, W], log_z float32 [B, 1], state.

        Given device tensors of fixed shapes, this and `decode` wait for nothing and can be captured in a CUDA graph.
        """
        mask = self._tensor(attention_mask)
        logits, log_z, prefix, *rest = self._prefill(self._tensor(input_ids), mask, self._table(level_tokens))
        if rest:
            suffix = rest[0]
        else:
            batch, heads, _, dim = prefix[0][0].shape
            suffix = [(k.new_empty(batch, 1, heads, 0, dim), v.new_empty(batch, 1, heads, 0, dim)) for k, v in prefix]
        return logits, log_z, TorchState(mask, prefix, suffix)

    @torch.inference_mode()
    def decode(
        self, state: "TorchState", input_ids: Any, parents: Any, level_tokens: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """int64 [B, M], int64 [B, M], int64 [W] -> logits float32 [B, M, W], log_z float32 [B, M]; grows `state`."""
        logits, log_z, state.suffix = self._decode(
            self._tensor(input_ids),
            self._tensor(parents),
            state.mask,
            self._table(level_tokens),
            state.prefix,
            state.suffix,
        )
        return logits, log_z

    def beams(self, table: np.ndarray, codes: Any, parents: Any) -> tuple[Tensor, Tensor]:
        """Tokens `table[codes]` and parents int64 [B, M], dead beams at the first of each."""
        codes, parents = self._tensor(codes).clamp(min=0), self._tensor(parents).clamp(min=0)
        return self._table(table)[codes.long()], parents.long()

    def _tensor(self, array: Any) -> Tensor:
        return torch.as_tensor(array, device=self.device)

    def _table(self, table: np.ndarray) -> Tensor:
        # The columns of a level are the same array at every call; the array is kept so that its id stays its own.
        held = self._tables.get(id(table))
        if held is None:
            held = self._tables.setdefault(id(table), (table, self._tensor(table)))
        return held[1]


class TorchState:
    """Keys and values of one batch: the prompt's, and the suffixes of the current beams."""

    __slots__ = ("mask", "prefix", "suffix")

    def __init__(self, mask: Tensor, prefix: list[KeyValue], suffix: list[KeyValue]):
        self.mask, self.prefix, self.suffix = mask, prefix, suffix


def _program(path: Path, device: str) -> Callable[..., Any]:
    try:
        _refuse_pickles(path)
        program = torch.export.load(path)
    except Exception as error:  # torch raises its own, zipfile's and json's errors for a damaged archive
        raise ValueError(f"{path}: not a usable torch.export program ({str(error).strip()[:300]})") from None
    return move_to_device_pass(program, device).module()


# What the exporter writes beside two lists of tensors and an empty file where example inputs would be pickled.
_ENTRIES = re.compile(
    r"models/model\.json|data/weights/weight_\d+|data/constants/tensor_\d+"
    r"|archive_format|archive_version|byteorder|\.data/(version|serialization_id)"
)
_LISTS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_EXAMPLES = "data/sample_inputs/model.pt"


def _refuse_pickles(path: Path) -> None:
    """Refuse an archive in which `torch.export.load` would unpickle anything: pickles can run code.

    It still reads older layouts, which are pickled, and loads machine code from packages: so only the entries are
    admitted that the exporter writes.
    """
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if len(set(names)) < len(names):
            raise ValueError("an entry stands in it twice; readers differ in which one they take")
        for name in names:
            inner = name.partition("/")[2]
            if inner in _LISTS:
                for entry, meta in json.loads(archive.read(name)).get("config", {}).items():
                    plain = re.fullmatch(r"(weight|tensor)_\d+", meta["path_name"])
                    if meta.get("use_pickle") is not False or not plain:
                        raise ValueError(f"{name}: {entry} is pickled, which can run code")
            elif inner == _EXAMPLES:
                if archive.getinfo(name).file_size:
                    raise ValueError(f"{name}: pickled example inputs, which can run code")
            elif not _ENTRIES.fullmatch(inner):
                raise ValueError(f"{name}: not an entry that `trieton export` writes; others can run code")
