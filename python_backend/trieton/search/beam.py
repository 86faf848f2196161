"""Exact beam search over a StaticIndex: the loop over levels. One level is one step of a kernel.

The step is the contract at the top of `trieton.search.kernels`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from trieton.constraint.plane import Plane
from trieton.index.static_index import StaticIndex
from trieton.search.kernels import NORMALISE, Beams, Search

NextLogits = Callable[[int, Any, Any], Any]
GROWTH = 4  # how much wider an exact search looks each time
MAX_WIDTH = 1 << 24  # beams of one request; a bound on mistakes, memory ends earlier
_MODULES = {"torch": "reference", "cpu": "cpu", "gpu": "gpu"}


@dataclass(frozen=True, eq=False)
class BeamResult:
    """Results of B requests, best first; K is the largest number of results asked for, L the number of levels.

    Attributes:
        scores: float32 [B, K], summed log-probabilities; -inf behind the last result.
        codes: int32 [B, K, L]; -1 behind the end of a short semantic ID, and in unused rows.
        leaves: int64 [B, K], rank of the semantic ID in the index; -1 in unused rows.
        num_valid: int32 [B], how many results are real.
        certified: bool [B], no pruned partial score exceeded the last result's, so the results are the true top of
            everything the constraint allows, not only of the beam.
        bound: float32 [B], the highest partial score that was pruned before the last level; -inf if none. The first
            results are proven down to the last one whose score is at least this. What was given up because enough
            whole semantic IDs had a better score does not count: it could not have come into the results.
        errors: per request None, or why it has no results.
        ranked: int64 [B], candidates that the kernel had to rank, see `trieton.search.kernels`; None where it does not
            count.
    """

    scores: np.ndarray
    codes: np.ndarray
    leaves: np.ndarray
    num_valid: np.ndarray
    certified: np.ndarray
    bound: np.ndarray
    errors: list[str | None]
    ranked: np.ndarray | None = None


def beam_search(
    next_logits: NextLogits,
    index: StaticIndex,
    *,
    batch_size: int,
    beam_width: int | Sequence[int] | np.ndarray,
    constraints: Sequence[Plane | None] | None = None,
    kernel: str = "auto",
    num_results: int | None = None,
    exact: bool = False,
    max_beam_width: int = 8192,
    normalise: str | Sequence[str] = "vocabulary",
    threads: int = 1,
) -> BeamResult:
    """Search the best semantic IDs of each request of a batch.

    Args:
        next_logits: called once per level, `next_logits(level, codes, parents)`, with what each beam chose at the level
            before (integer [B, M], -1 for a dead beam) and its place among the beams before; None and None at level 0.
            Returns logits [B, M', width] over the level's codes (M' = 1 at level 0, M after it; width at least
            `index.width(level)`, what exceeds it is normalised over and never chosen), float32, float16 or bfloat16; or
            a pair (logits, log_z float32 [B, M']) with the log-normaliser over the model's whole vocabulary. NumPy or
            torch. The "cpu" kernel hands over NumPy arrays, the others torch tensors.
        beam_width: one width, or one per request. M is the largest.
        constraints: per request a plane of `trieton.constraint.compile.compile_constraint`, or None.
        kernel: "torch", "cpu", "gpu", or "auto": "cpu" for an index on the CPU, else "gpu".
        num_results: results to return of each beam; the whole beam when None.
        exact: search the uncertified requests again, each time with a beam four times as wide, until their results are
            proven or the beam reaches `max_beam_width`, or the widest that the kernel takes; `certified` tells which.
            Needs a `next_logits` with a method `restart(requests)` that returns a `next_logits` at level 0 for those
            requests only (int64, ascending).
        normalise: over what the probabilities of a step add up to 1; one choice, or one per request.
            "vocabulary": all tokens of the model, by the log_z that comes with the logits or by their whole row.
            "level": the codes of the level, and the end code where there is one.
            "allowed": the children of the prefix that the trie and the constraint leave. A prefix that the model finds
            unlikely among all tokens is then not held against the items below it.
        threads: of a step of the "cpu" kernel. More than one are faster on cores that have nothing else to do and many
            times slower on busy ones, because they wait for each other.

    Raises:
        ValueError: arguments or logits of the wrong shape or type. Numbers that are wrong (NaN, +inf) fail their own
            request only: `BeamResult.errors`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
    widths = checked_widths(beam_width, batch_size)
    planes = checked_planes(constraints, batch_size, index)
    if num_results is not None and num_results < 1:
        raise ValueError(f"num_results: expected at least 1, got {num_results}")
    if exact and not hasattr(next_logits, "restart"):
        raise ValueError("exact=True searches more than once: expected next_logits with a method restart(requests)")
    wanted = widths.copy() if num_results is None else np.minimum(widths, np.int32(num_results))
    modes = checked_normalise(normalise, batch_size)
    open_search, widest = _kernel(kernel, index, threads)
    result = finish(_search(next_logits, index, open_search(index, widths, planes, modes)).result(), wanted)
    widest = min(widest, max_beam_width)
    while exact:
        open_requests = ~result.certified & (widths < widest) & [error is None for error in result.errors]
        again = np.flatnonzero(open_requests)
        if not again.size:
            break
        widths[again] = np.minimum(widths[again].astype(np.int64) * GROWTH, widest)
        restarted = next_logits.restart(again)  # type: ignore[attr-defined]
        search = open_search(index, widths[again], [planes[b] for b in again], None if modes is None else modes[again])
        search = _search(restarted, index, search)
        _replace(result, again, finish(search.result(), wanted[again]))
    return result


def _search(next_logits: NextLogits, index: StaticIndex, search: Search) -> Search:
    """Go down the levels while anything lives."""
    batch, width = search.shape
    codes = parents = None
    for level in range(index.num_levels):
        logits, log_z = _checked(next_logits(level, codes, parents), index, level, batch, width if level else 1)
        codes, parents = search.step(level, logits, log_z)
        if not search.lives():
            break
    return search


def _kernel(name: str, index: StaticIndex, threads: int) -> tuple[Callable[..., Search], int]:
    """The class of a kernel, with its options, and the widest beam that it takes."""
    if name == "auto":
        name = "cpu" if index.device == "cpu" else "gpu"
    if name not in _MODULES:
        raise ValueError(f"kernel: expected one of {['auto', *_MODULES]}, got {name!r}")
    module = import_module(f"trieton.search.kernels.{_MODULES[name]}")
    if name == "cpu":
        return partial(module.Search, threads=threads), MAX_WIDTH
    if threads != 1:
        raise ValueError(f"threads: expected 1, the kernel {name!r} has no others; got {threads}")
    return module.Search, getattr(module, "MAX_BEAM", MAX_WIDTH)


def checked_widths(beam_width: int | Sequence[int] | np.ndarray, batch_size: int) -> np.ndarray:
    """Beam widths int32 [B]. Raises ValueError."""
    given = np.asarray(beam_width)
    if given.dtype.kind not in "iu" or given.shape not in ((), (batch_size,)):
        raise ValueError(f"beam_width: expected an integer or {batch_size} of them, got {beam_width!r}")
    if not (given > 0).all() or int(given.max()) > MAX_WIDTH:
        raise ValueError(f"beam_width: expected 1 to {MAX_WIDTH}, got {int(given.min())} to {int(given.max())}")
    widths = np.empty(batch_size, np.int32)
    widths[:] = given
    return widths


def checked_normalise(normalise: str | Sequence[str], batch_size: int) -> np.ndarray | None:
    """Places in `kernels.NORMALISE`, int8 [B]; None where all are the first. Raises ValueError."""
    given = [normalise] * batch_size if isinstance(normalise, str) else list(normalise)
    if len(given) != batch_size:
        raise ValueError(f"normalise: expected {batch_size}, one per request, got {len(given)}")
    for request, choice in enumerate(given):
        if choice not in NORMALISE:
            raise ValueError(f"normalise: request {request}: expected one of {list(NORMALISE)}, got {choice!r}")
    modes = np.array([NORMALISE.index(choice) for choice in given], np.int8)
    return modes if modes.any() else None


def checked_planes(
    constraints: Sequence[Plane | None] | None, batch_size: int, index: StaticIndex
) -> list[Plane | None]:
    """B planes or None, each of this index. Raises ValueError."""
    planes: list[Plane | None] = [None] * batch_size if constraints is None else list(constraints)
    if len(planes) != batch_size:
        raise ValueError(f"constraints: expected {batch_size}, one per request, got {len(planes)}")
    edges = [len(codes) for codes in index.codes] + [index.num_leaves] * (index.head_levels < index.num_levels)
    for request, plane in enumerate(planes):
        if plane is not None and not _fits(plane, index, edges):
            raise ValueError(f"constraints: request {request}: the plane was compiled for another index")
    return planes


def _fits(plane: Plane, index: StaticIndex, edges: list[int]) -> bool:
    """Whether a plane is one of `index`, which has so many edges on each plane level."""
    if plane.index is not None and plane.index() is not index:
        return False
    absent = [None] * len(edges)
    lists = (plane.bits, plane.dead or absent, plane.alive or absent)
    if any(len(held) != len(edges) for held in lists):
        return False
    for bits, dead, alive, count in zip(*lists, edges, strict=True):
        if bits is not None and not count <= len(bits) * 8 < count + 8:
            return False
        # Sorted, so the ends tell.
        if any(held is not None and len(held) and not 0 <= held[0] <= held[-1] < count for held in (dead, alive)):
            return False
    return True


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


def finish(beams: Beams, wanted: np.ndarray) -> BeamResult:
    """The best `wanted` (int32 [B]) of each request's beams, and what is proven about them."""
    most = int(wanted.max())
    scores, codes, leaves = beams.scores[:, :most], beams.codes[:, :most], beams.leaves[:, :most]
    if int(wanted.min()) < most:
        beyond = np.arange(most) >= wanted[:, None]
        scores[beyond], codes[beyond], leaves[beyond] = -np.inf, -1, -1
    num_valid = (leaves >= 0).sum(1, dtype=np.int32)
    last = scores[np.arange(len(wanted)), np.maximum(num_valid, 1) - 1]
    proven = np.where(num_valid == wanted, last, -np.inf)  # where results are missing, nothing may have been pruned
    certified = (beams.bound <= proven) & (beams.failed < 0)
    errors = [None if level < 0 else f"level {level}: NaN or +inf among the logits" for level in beams.failed.tolist()]
    return BeamResult(scores, codes, leaves, num_valid, certified, beams.bound, errors, beams.ranked)


def _replace(result: BeamResult, requests: np.ndarray, by: BeamResult) -> None:
    """Put the results of a later search in the place of the earlier ones of the same requests."""
    width = by.scores.shape[1]
    for name in ("scores", "codes", "leaves"):
        getattr(result, name)[requests, :width] = getattr(by, name)
    for name in ("num_valid", "certified", "bound"):
        getattr(result, name)[requests] = getattr(by, name)
    for place, request in enumerate(requests):
        result.errors[request] = by.errors[place]
    if result.ranked is not None and by.ranked is not None:
        result.ranked[requests] += by.ranked
