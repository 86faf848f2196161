"""The beam step in plain torch: the readable reference, on any device. Shapes depend on data, so it synchronises."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trieton.constraint.plane import Plane
from trieton.index.static_index import StaticIndex
from trieton.search.kernels import Beams
from trieton.search.kernels.arrays import as_tensor

NEG_INF = float("-inf")


class Search:
    """See `trieton.search.kernels`. A beam: (score, span [lo, hi) of candidates, ended); a dead one: empty span."""

    def __init__(self, index: StaticIndex, widths: np.ndarray, planes: Sequence[Plane | None]) -> None:
        self.index, self.planes, self.device = index, planes, torch.device(index.device)
        batch, levels = len(widths), index.num_levels
        self.widths = torch.as_tensor(widths, dtype=torch.int64, device=self.device)  # [B]
        self.width = int(widths.max())
        self.score = torch.zeros((batch, 1), device=self.device)  # [B, M']
        self.lo = torch.full((batch, 1), int(index.row_ptr[0][0]), device=self.device)
        self.hi = torch.full((batch, 1), int(index.row_ptr[0][1]), device=self.device)
        self.ended = torch.zeros((batch, 1), dtype=torch.bool, device=self.device)
        self.codes = torch.full((batch, 1, levels), -1, dtype=torch.int32, device=self.device)
        self.bound = torch.full((batch,), NEG_INF, device=self.device)
        self.failed = torch.full((batch,), -1, dtype=torch.int32, device=self.device)
        self.ranked = torch.zeros(batch, dtype=torch.int64, device=self.device)  # here: everything allowed

    def step(self, level: int, logits: Any, log_z: Any | None) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = self._log_probs(level, as_tensor(logits, self.device), log_z)
        beam, code, lo, hi = self._children(level)  # all candidates of all requests, in enumeration order
        request = beam // self.score.shape[1]
        step = torch.where(self.ended.flatten()[beam], 0.0, log_p.flatten(0, 1)[beam, code])
        score = self.score.flatten()[beam] + step
        exists = score > NEG_INF
        beam, code, lo, hi, request, score = (t[exists] for t in (beam, code, lo, hi, request, score))

        order = torch.argsort(score, descending=True, stable=True)
        order = order[torch.argsort(request[order], stable=True)]
        counts = torch.bincount(request, minlength=len(self.widths))
        self.ranked += counts
        place = torch.arange(len(order), device=self.device) - (counts.cumsum(0) - counts)[request[order]]
        if level < self.index.num_levels - 1:
            pruned = order[place == self.widths[request[order]]]  # the best one that is lost, per request
            self.bound[request[pruned]] = torch.maximum(self.bound[request[pruned]], score[pruned])
        kept = place < self.widths[request[order]]
        order, place = order[kept], place[kept]
        return self._survivors(level, request[order], place, *(t[order] for t in (beam, code, lo, hi, score)))

    def result(self) -> Beams:
        live = self.hi > self.lo
        leaves = torch.where(live, self.lo, -1)
        arrays = (self.score, self.codes, leaves, self.bound, self.failed, self.ranked)
        return Beams(*(a.cpu().numpy() for a in arrays))

    def _log_probs(self, level: int, logits: torch.Tensor, log_z: Any | None) -> torch.Tensor:
        """log p [B, M', width]; a request whose logits are not numbers is marked as failed and loses its beams."""
        rows = (self.hi > self.lo) & ~self.ended
        wrong = (logits.isnan() | (logits == torch.inf)).any(2)
        if log_z is None:
            log_z = torch.logsumexp(logits.double(), 2).float()
        else:
            log_z = as_tensor(log_z, self.device)
            wrong |= log_z.isnan() | (log_z == torch.inf)
        wrong = (wrong & rows).any(1)
        self.failed[wrong] = level
        self.bound[wrong] = NEG_INF
        self.hi = torch.where(wrong[:, None], self.lo, self.hi)
        nothing = (logits == NEG_INF) | (log_z == NEG_INF)[:, :, None]
        return torch.where(nothing, NEG_INF, (logits - log_z[:, :, None]).clamp(max=0))

    def _children(self, level: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(beam, code, lo, hi) of every allowed child of every live beam; `beam` counts through [B, M']."""
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
        return beam[alive], code[alive], lo[alive], hi[alive]

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

    def _survivors(
        self,
        level: int,
        request: torch.Tensor,
        place: torch.Tensor,
        beam: torch.Tensor,
        code: torch.Tensor,
        lo: torch.Tensor,
        hi: torch.Tensor,
        score: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scatter the kept candidates into fresh beams; returns (codes, parents) [B, M]."""
        shape = (len(self.widths), self.width)

        def spread(values: torch.Tensor, fill: float, dtype: torch.dtype) -> torch.Tensor:
            out = torch.full(shape, fill, dtype=dtype, device=self.device)
            out[request, place] = values.to(dtype)
            return out

        codes = spread(code, -1, torch.int64)
        parents = spread(beam % self.score.shape[1], -1, torch.int64)
        history = self.codes[torch.arange(shape[0], device=self.device)[:, None], parents.clamp(min=0)]
        history[parents < 0] = -1
        end = self.index.end_code(level)
        history[:, :, level] = torch.where(codes == end, -1, codes)
        self.codes, self.ended = history, (codes == end) & (codes >= 0)
        self.score = spread(score, NEG_INF, torch.float32)
        self.lo, self.hi = spread(lo, 0, torch.int64), spread(hi, 0, torch.int64)
        return codes, parents


def _take(array: np.ndarray, at: torch.Tensor) -> torch.Tensor:
    """array[at] as int64. The index lives where it was mapped, so only what a step needs is ever moved."""
    return torch.from_numpy(array[at.cpu().numpy()].astype(np.int64)).to(at.device)


def _member(ascending: np.ndarray, values: torch.Tensor) -> torch.Tensor:
    if not len(ascending):
        return torch.zeros_like(values, dtype=torch.bool)
    held = values.cpu().numpy()
    place = np.minimum(np.searchsorted(ascending, held), len(ascending) - 1)
    return torch.from_numpy(ascending[place] == held).to(values.device)
