"""Exact beam search over a StaticIndex: the loop over levels. One level is one step of a kernel.

The step is the contract at the top of `trieton.kernels`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from trieton.index import StaticIndex
from trieton.kernels import Search
from trieton.plane import Plane

NextLogits = Callable[[int, Any, Any], Any]
_MODULES = {"torch": "torch_", "cpu": "cpu", "gpu": "gpu"}


@dataclass(frozen=True, eq=False)
class BeamResult:
    """Results of B requests, best first; M is the largest beam width of the call, L the number of levels.

    Attributes:
        scores: float32 [B, M], summed log-probabilities; -inf behind the last result.
        codes: int32 [B, M, L]; -1 behind the end of a short semantic ID, and in unused rows.
        leaves: int64 [B, M], rank of the semantic ID in the index; -1 in unused rows.
        num_valid: int32 [B], how many results are real.
        certified: bool [B], no pruned partial score exceeded the last result's, so the results are the true top of
            everything the constraint allows, not only of the beam.
        bound: float32 [B], the highest partial score that was pruned before the last level; -inf if none. The first K
            results are proven when their last score is at least this.
        errors: per request None, or why it has no results.
    """

    scores: np.ndarray
    codes: np.ndarray
    leaves: np.ndarray
    num_valid: np.ndarray
    certified: np.ndarray
    bound: np.ndarray
    errors: list[str | None]


def beam_search(
    next_logits: NextLogits,
    index: StaticIndex,
    *,
    batch_size: int,
    beam_width: int | Sequence[int] | np.ndarray,
    constraints: Sequence[Plane | None] | None = None,
    kernel: str = "auto",
) -> BeamResult:
    """Search the best semantic IDs of each request of a batch.

    Args:
        next_logits: called once per level, `next_logits(level, codes, parents)`, with what each beam chose at the level
            before (integer [B, M], -1 for a dead beam) and its place among the beams before; None and None at level 0.
            Returns logits [B, M', width] over the level's codes (M' = 1 at level 0, M after it; width at least
            `index.width(level)`, what exceeds it is normalised over and never chosen), float32, float16 or bfloat16; or
            a pair (logits, log_z float32 [B, M']) with the log-normaliser over the model's whole vocabulary. NumPy or
            torch. The "cpu" kernel hands over NumPy arrays, the others torch tensors.
        beam_width: one width, or one per request.
        constraints: per request a plane of `trieton.constraints.compile_constraint`, or None.
        kernel: "torch", "cpu", "gpu", or "auto": "cpu" for an index on the CPU, else "gpu".

    Raises:
        ValueError: arguments or logits of the wrong shape or type. Numbers that are wrong (NaN, +inf) fail their own
            request only: `BeamResult.errors`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
    widths = _checked_widths(beam_width, batch_size)
    planes = list(constraints) if constraints is not None else [None] * batch_size
    if len(planes) != batch_size:
        raise ValueError(f"constraints: expected {batch_size}, one per request, got {len(planes)}")
    search = _open(kernel, index)(index, widths, planes)
    width = int(widths.max())
    codes = parents = None
    for level in range(index.num_levels):
        logits, log_z = _checked(next_logits(level, codes, parents), index, level, batch_size, width if level else 1)
        codes, parents = search.step(level, logits, log_z)
    return _finish(search, widths)


def _open(kernel: str, index: StaticIndex) -> type[Search]:
    if kernel == "auto":
        kernel = "cpu" if index.device == "cpu" else "gpu"
    if kernel not in _MODULES:
        raise ValueError(f"kernel: expected one of {['auto', *_MODULES]}, got {kernel!r}")
    found: type[Search] = import_module(f"trieton.kernels.{_MODULES[kernel]}").Search
    return found


def _checked_widths(beam_width: int | Sequence[int] | np.ndarray, batch_size: int) -> np.ndarray:
    given = np.asarray(beam_width)
    if given.dtype.kind not in "iu" or given.shape not in ((), (batch_size,)):
        raise ValueError(f"beam_width: expected an integer or {batch_size} of them, got {beam_width!r}")
    if int(given.min()) < 1:
        raise ValueError(f"beam_width: expected at least 1, got {int(given.min())}")
    return np.broadcast_to(given, (batch_size,)).astype(np.int32)


def _checked(answer: Any, index: StaticIndex, level: int, batch_size: int, beams: int) -> tuple[Any, Any | None]:
    logits, log_z = answer if isinstance(answer, tuple) else (answer, None)
    shape, need = tuple(logits.shape), index.width(level)
    if len(shape) != 3 or shape[:2] != (batch_size, beams) or shape[2] < need:
        raise ValueError(
            f"next_logits, level {level}: expected logits [{batch_size}, {beams}, {need} or wider], got {list(shape)}"
        )
    if log_z is not None and tuple(log_z.shape) != (batch_size, beams):
        raise ValueError(f"next_logits, level {level}: expected log_z [{batch_size}, {beams}], got {list(log_z.shape)}")
    return logits, log_z


def _finish(search: Search, widths: np.ndarray) -> BeamResult:
    beams = search.result()
    num_valid = (beams.leaves >= 0).sum(1, dtype=np.int32)
    last = beams.scores[np.arange(len(widths)), np.maximum(num_valid, 1) - 1]
    certified = (beams.bound <= last) & ((num_valid == widths) | (beams.bound == -np.inf)) & (beams.failed < 0)
    errors = [f"level {level}: NaN or +inf among the logits" if level >= 0 else None for level in beams.failed.tolist()]
    return BeamResult(beams.scores, beams.codes, beams.leaves, num_valid, certified, beams.bound, errors)
