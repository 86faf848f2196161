"""What kernels are handed: logits of either library as float32, and where index and planes lie in memory.

torch is imported only where a tensor is handed over: a server on the CPU never needs it, and each version of a model is
a process of its own, which starts in half the time and with half the memory without it.
"""

import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from trieton.constraint.plane import Plane
from trieton.index.static_index import StaticIndex

if TYPE_CHECKING:
    import torch

NO_END = -2  # stands for the end code where a level has none; no code equals it


def as_tensor(values: Any, device: "torch.device") -> "torch.Tensor":
    """`values` as float32 on `device`; only conversions that change no number."""
    import torch

    tensor = values if isinstance(values, torch.Tensor) else _from_numpy(values)
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"expected float32, float16 or bfloat16 from next_logits, got {tensor.dtype}")
    return tensor.detach().to(device, torch.float32)


def as_array(values: Any) -> np.ndarray:
    """`values` as float32 on the host; only conversions that change no number."""
    torch = sys.modules.get("torch")  # whoever holds a tensor has imported it
    if torch is not None and isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise ValueError(f"the cpu kernel expected logits on the CPU, got {values.device}; use kernel='gpu'")
        values = (values.float() if values.dtype in (torch.float16, torch.bfloat16) else values).detach().numpy()
    if values.dtype == np.float32:
        return values
    if values.dtype.name in ("float16", "bfloat16"):
        return values.astype(np.float32)
    raise ValueError(f"expected float32, float16 or bfloat16 from next_logits, got {values.dtype}")


def rows(logits: Any) -> tuple[np.ndarray, tuple[int, int]]:
    """The memory of logits [B, M', V] as one flat array, and the distance between requests and between beams in it.

    Views with gaps, such as a slice of a larger vocabulary, are used as they are; others are copied.
    """
    values = as_array(logits)
    if values.flags.c_contiguous:
        return values.reshape(-1), (values.shape[1] * values.shape[2], values.shape[2])
    steps = [s // 4 for s in values.strides]
    if min(steps) < 0 or steps[2] != 1 or any(s % 4 for s in values.strides):
        return rows(np.ascontiguousarray(values))
    span = sum(s * (n - 1) for s, n in zip(steps, values.shape, strict=True)) + 1
    return np.lib.stride_tricks.as_strided(values, (span,), (4,)), (steps[0], steps[1])


_level_tables: WeakKeyDictionary[StaticIndex, np.ndarray] = WeakKeyDictionary()
_plane_tables: WeakKeyDictionary[Plane, list[tuple[int, ...]]] = WeakKeyDictionary()


def level_table(index: StaticIndex) -> np.ndarray:
    """Where each level lies in memory, int64 [L, 8].

    Columns: address of the codes, bytes per code, address of the spans that edges lead to (0 where an edge or a run is
    its own span), bytes per offset, whether it is a tail level, columns of its logits, end code, plane level.
    """
    if index in _level_tables:
        return _level_tables[index]
    table = np.zeros((index.num_levels, 8), np.int64)
    for level in range(index.num_levels):
        tail = level >= index.head_levels
        codes = index.tail[level - index.head_levels] if tail else index.codes[level]
        table[level, :2] = _address(codes), codes.itemsize
        if not tail and level + 1 < len(index.row_ptr):
            spans = index.row_ptr[level + 1]
            table[level, 2:4] = _address(spans), spans.itemsize
        end = index.end_code(level)
        table[level, 4:] = tail, index.width(level), end if end >= 0 else NO_END, min(level, index.head_levels)
    _level_tables[index] = table
    return table


def plane_table(plane: Plane | None, index: StaticIndex) -> list[tuple[int, ...]]:
    """Where each level of a plane lies in memory.

    Columns: address of the bits (0: all set), address and number of the dead, address and number (-1: no such list) of
    the alive.
    """
    levels = index.head_levels + (index.head_levels < index.num_levels)
    if plane is None:
        return [(0, 0, 0, 0, -1)] * levels
    if plane not in _plane_tables:
        absent = [None] * levels
        _plane_tables[plane] = [
            (
                0 if bits is None else _address(bits, np.uint8),
                *((0, 0) if dead is None else (_address(dead, np.int64), len(dead))),
                *((0, -1) if alive is None else (_address(alive, np.int64), len(alive))),
            )
            for bits, dead, alive in zip(plane.bits, plane.dead or absent, plane.alive or absent, strict=True)
        ]
    return _plane_tables[plane]


def _address(array: np.ndarray, dtype: Any = None) -> int:
    """Where the elements of `array` lie, which must be in order and of the type that will be read."""
    if not array.flags.c_contiguous or (dtype is not None and array.dtype != dtype):
        raise ValueError(f"expected a contiguous array of {np.dtype(dtype or array.dtype)}, got {array.dtype}")
    return array.ctypes.data


def _from_numpy(array: np.ndarray) -> "torch.Tensor":
    import torch

    if array.dtype.name == "bfloat16":  # as package ml_dtypes names it
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
