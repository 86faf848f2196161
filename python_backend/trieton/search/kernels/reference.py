"""The beam step in plain torch: the readable reference, on any device. Shapes depend on data, so it synchronises."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from trieton.constraint.plane import Plane
from trieton.index.static_index import StaticIndex
from trieton.search.kernels import ALLOWED, LEVEL, Beams
from trieton.search.kernels.arrays import as_tensor

NEG_INF = float("-inf")


@dataclass
class Found:
    """Candidates of all requests, flat and in the order of enumeration: request, beam, code.

    Attributes:
        beam: counts through [B, M'].
        lo, hi: span of what stands below: edges of the next level, or leaves.
    """

    beam: torch.Tensor
    code: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor

    def take(self, rows: torch.Tensor) -> "Found":
        return Found(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass
class Ended:
    """Whole semantic IDs, flat: in order of request, score, and when they ended.

    Attributes:
        codes: [n, L], -1 behind the end.
        level: where they ended; `parent` is the beam [0, M') that they ended in.
    """

    request: torch.Tensor
    score: torch.Tensor
    leaf: torch.Tensor
    codes: torch.Tensor
    level: torch.Tensor
    parent: torch.Tensor

    @classmethod
    def none(cls, levels: int, device: torch.device) -> "Ended":
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(empty, empty.float(), empty, empty.int().reshape(0, levels), empty, empty)

    def and_then(self, more: "Ended") -> "Ended":
        return Ended(*(torch.cat([getattr(self, f.name), getattr(more, f.name)]) for f in fields(self)))

    def take(self, rows: torch.Tensor) -> "Ended":
        return Ended(*(getattr(self, f.name)[rows] for f in fields(self)))


class Search:
    """See `trieton.search.kernels`. A beam: (score, span [lo, hi) of candidates); a dead one: empty span."""

    def __init__(
        self,
        index: StaticIndex,
        widths: np.ndarray,
        planes: Sequence[Plane | None],
        normalise: np.ndarray | None = None,
    ) -> None:
        self.index, self.planes, self.device = index, planes, torch.device(index.device)
        batch, levels = len(widths), index.num_levels
        self.widths = torch.as_tensor(widths, dtype=torch.int64, device=self.device)  # [B]
        self.normalise = torch.as_tensor(np.zeros(batch) if normalise is None else normalise, device=self.device)
        self.shape = (batch, int(widths.max()))
        self.score = torch.zeros((batch, 1), device=self.device)  # [B, M']
        self.lo = torch.full((batch, 1), int(index.row_ptr[0][0]), device=self.device)
        self.hi = torch.full((batch, 1), int(index.row_ptr[0][1]), device=self.device)
        self.codes = torch.full((batch, 1, levels), -1, dtype=torch.int32, device=self.device)
        self.ended = Ended.none(levels, self.device)
        self.bound = torch.full((batch,), NEG_INF, device=self.device)
        self.failed = torch.full((batch,), -1, dtype=torch.int32, device=self.device)
        self.ranked = torch.zeros(batch, dtype=torch.int64, device=self.device)  # here: everything allowed

    def step(self, level: int, logits: Any, log_z: Any | None) -> tuple[torch.Tensor, torch.Tensor]:
        logits = as_tensor(logits, self.device)
        log_z = None if log_z is None else as_tensor(log_z, self.device)
        self._fail(level, logits, log_z)
        found = self._children(level)
        score = self._scores(level, logits, log_z, found)
        exists = score > NEG_INF
        found, score = found.take(exists), score[exists]
        self.ranked += torch.bincount(self._request(found), minlength=len(self.widths))

        whole = (found.code == self.index.end_code(level)) | (level == self.index.num_levels - 1)
        self._end(level, found.take(whole), score[whole])
        found, score = found.take(~whole), score[~whole]

        beats = score > self._least()[self._request(found)]
        found, score = found.take(beats), score[beats]
        order, place = _ranking(self._request(found), score)
        request = self._request(found)[order]
        lost = place == self.widths[request]  # the best one that found no room, per request
        self.bound[request[lost]] = torch.maximum(self.bound[request[lost]], score[order[lost]])
        kept = place < self.widths[request]
        order, place = order[kept], place[kept]
        return self._survivors(level, place, found.take(order), score[order])

    def lives(self) -> bool:
        return bool((self.hi > self.lo).any())

    def result(self) -> Beams:
        ended, shape = self.ended, self.shape
        _, place = _ranking(ended.request, ended.score)
        scores = torch.full(shape, NEG_INF, device=self.device)
        codes = torch.full((*shape, self.index.num_levels), -1, dtype=torch.int32, device=self.device)
        leaves = torch.full(shape, -1, dtype=torch.int64, device=self.device)
        for out, values in ((scores, ended.score), (codes, ended.codes), (leaves, ended.leaf)):
            out[ended.request, place] = values
        return Beams(*(a.cpu().numpy() for a in (scores, codes, leaves, self.bound, self.failed, self.ranked)))

    def _request(self, found: Found) -> torch.Tensor:
        return found.beam // self.score.shape[1]

    def _fail(self, level: int, logits: torch.Tensor, log_z: torch.Tensor | None) -> None:
        """A request whose logits are not numbers is marked, and loses its beams and what has ended."""
        wrong = (logits.isnan() | (logits == torch.inf)).any(2)
        if log_z is not None:
            wrong |= log_z.isnan() | (log_z == torch.inf)
        wrong = (wrong & (self.hi > self.lo)).any(1)
        self.failed[wrong] = level
        self.bound[wrong] = NEG_INF
        self.hi = torch.where(wrong[:, None], self.lo, self.hi)
        self.ended = self.ended.take(~wrong[self.ended.request])

    def _scores(self, level: int, logits: torch.Tensor, log_z: torch.Tensor | None, found: Found) -> torch.Tensor:
        """float32 score of every candidate."""
        x = logits.flatten(0, 1)[found.beam, found.code]
        if log_z is None:
            log_z = torch.logsumexp(logits.double(), 2).float()
        mode = self.normalise[:, None]
        if (mode == LEVEL).any():
            codes = logits[:, :, : self.index.width(level)]
            log_z = torch.where(mode == LEVEL, torch.logsumexp(codes.double(), 2).float(), log_z)
        if (mode == ALLOWED).any():
            log_z = torch.where(mode == ALLOWED, self._over_candidates(x, found), log_z)
        log_z = log_z.flatten()[found.beam]
        log_p = torch.where((x == NEG_INF) | (log_z == NEG_INF), NEG_INF, (x - log_z).clamp(max=0))
        return self.score.flatten()[found.beam] + log_p

    def _over_candidates(self, x: torch.Tensor, found: Found) -> torch.Tensor:
        """log_z [B, M'] over the candidates of each beam."""
        top = torch.full((self.score.numel(),), NEG_INF, dtype=torch.float64, device=self.device)
        top = top.scatter_reduce(0, found.beam, x.double(), "amax")
        shift = top.nan_to_num(neginf=0.0)
        total = torch.zeros_like(top).index_add_(0, found.beam, (x.double() - shift[found.beam]).exp())
        return (total.log() + shift).float().reshape(self.score.shape)

    def _children(self, level: int) -> Found:
        """Every allowed child of every live beam."""
        index = self.index
        counts = (self.hi - self.lo).clamp(min=0).flatten()
        beam = torch.repeat_interleave(torch.arange(len(counts), device=self.device), counts)
        first = (counts.cumsum(0) - counts)[beam]
        at = torch.arange(len(beam), device=self.device) - first + self.lo.flatten()[beam]
        alive = self._alive(level, beam, at)
        if level < index.head_levels:
            code = _take(index.codes[level], at)
            lo, hi = at, at + 1
            if level + 1 < len(index.row_ptr):
                ptr = index.row_ptr[level + 1]
                lo, hi = _take(ptr, at), _take(ptr, at + 1)
        else:
            codes = _take(index.tail[level - index.head_levels], at)
            opens = torch.ones_like(alive)
            opens[1:] = (codes[1:] != codes[:-1]) | (beam[1:] != beam[:-1])
            run = opens.cumsum(0) - 1
            size = torch.bincount(run)
            alive = torch.zeros(len(size), dtype=torch.bool, device=self.device).index_put((run[alive],), alive[alive])
            beam, code, lo = beam[opens], codes[opens], at[opens]
            hi = lo + size
        return Found(beam, code, lo, hi).take(alive)

    def _alive(self, level: int, beam: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """bool per candidate: whether the plane of its request allows it."""
        alive = torch.ones(len(at), dtype=torch.bool, device=self.device)
        place = min(level, self.index.head_levels)
        for request, plane in enumerate(self.planes):
            if plane is None:
                continue
            mine = (beam // self.score.shape[1] == request).nonzero().flatten()
            edges = at[mine]
            if plane.alive is not None:
                alive[mine] = _member(plane.alive[place], edges)
                continue
            bits = plane.bits[place]
            if bits is not None:
                alive[mine] &= (_take(bits, edges >> 3) >> (edges & 7) & 1).bool()
            if plane.dead is not None:
                alive[mine] &= ~_member(plane.dead[place], edges)
        return alive

    def _end(self, level: int, found: Found, score: torch.Tensor) -> None:
        """Add whole semantic IDs to those that have ended, and keep the best of each request."""
        leaf = found.lo
        for ptr in self.index.row_ptr[level + 2 :]:  # one state below another, down to the leaf
            leaf = _take(ptr, leaf)
        codes = self.codes.flatten(0, 1)[found.beam]
        codes[:, level] = torch.where(found.code == self.index.end_code(level), -1, found.code).int()
        parent = found.beam % self.score.shape[1]
        new = Ended(self._request(found), score, leaf, codes, torch.full_like(leaf, level), parent)
        ended = self.ended.and_then(new)
        order, place = _ranking(ended.request, ended.score)
        self.ended = ended.take(order[place < self.widths[ended.request[order]]])

    def _least(self) -> torch.Tensor:
        """What a beam of each request must exceed to come into the result, [B]."""
        least = torch.full((len(self.widths),), NEG_INF, device=self.device)
        _, place = _ranking(self.ended.request, self.ended.score)
        last = place == self.widths[self.ended.request] - 1
        least[self.ended.request[last]] = self.ended.score[last]
        return least

    def _survivors(
        self, level: int, place: torch.Tensor, found: Found, score: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter the kept candidates into fresh beams; returns (codes, parents) [B, M]."""
        shape, request, before = self.shape, self._request(found), self.score.shape[1]

        def spread(values: torch.Tensor, fill: float, dtype: torch.dtype) -> torch.Tensor:
            out = torch.full(shape, fill, dtype=dtype, device=self.device)
            out[request, place] = values.to(dtype)
            return out

        codes = spread(found.code, -1, torch.int64)
        parents = spread(found.beam % before, -1, torch.int64)
        history = self.codes[torch.arange(shape[0], device=self.device)[:, None], parents.clamp(min=0)]
        history[parents < 0] = -1
        history[:, :, level] = codes.int()
        self.codes = history
        self.score = spread(score, NEG_INF, torch.float32)
        self.lo, self.hi = spread(found.lo, 0, torch.int64), spread(found.hi, 0, torch.int64)
        return codes, parents


def _ranking(request: torch.Tensor, score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Order by (request, score descending, place), and for each of that order its place within the request."""
    order = torch.argsort(score, descending=True, stable=True)
    order = order[torch.argsort(request[order], stable=True)]
    counts = torch.bincount(request)
    place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[request[order]]
    return order, place


def _take(array: np.ndarray, at: torch.Tensor) -> torch.Tensor:
    """array[at] as int64. The index lives where it was mapped, so only what a step needs is ever moved."""
    return torch.from_numpy(array[at.cpu().numpy()].astype(np.int64)).to(at.device)


def _member(ascending: np.ndarray, values: torch.Tensor) -> torch.Tensor:
    if not len(ascending):
        return torch.zeros_like(values, dtype=torch.bool)
    held = values.cpu().numpy()
    place = np.minimum(np.searchsorted(ascending, held), len(ascending) - 1)
    return torch.from_numpy(ascending[place] == held).to(values.device)
