"""The beam step in OpenAI Triton: two launches per level, nothing that waits for the device, usable in a CUDA graph.

    _rank_children  one program per beam: normaliser, children, plane, and the keys of the beam's best children
    _keep_best      one program per request: the best of all keys become the new beams

A key is one int64 that sorts like (score, then the order of enumeration): in the high half the float32 score, its bits
made order-preserving, and in the low half the number m * S + offset of the candidate, counted backwards, where no state
of the level has more than S children. So both launches rank plain integers, ties come out as in every other kernel, and
a key alone leads back to its parent and its edge.

What has ended is a list of keys of its own, whose low half is the number level * M + m of the beam that it ended.

Level 0 reads nothing of an earlier search, so replaying a captured loop over the levels is a new search.
"""

import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl

from trieton.constraint.plane import Plane
from trieton.index.static_index import StaticIndex
from trieton.search.kernels import ALLOWED, LEVEL, Beams
from trieton.search.kernels.arrays import as_tensor

MAX_SORT = 1024  # keys that one program sorts at a time, unless the beam itself is wider
MAX_BEAM = 2047  # a program ranks one more than the beam in its registers; more would not fit
MANY_KEYS, MANY_WARPS = 1024, 8  # sorted at a time, from which the usual 4 warps would spill registers
ROW_BLOCKS = (512, 2048)  # logits that a program reads at a time, for short rows and for long ones
_ABSENT = -(2**63)
ABSENT = tl.constexpr(_ABSENT)
OVER_LEVEL, OVER_CHILDREN = tl.constexpr(LEVEL), tl.constexpr(ALLOWED)
LOW = tl.constexpr(2**32 - 1)


@triton.jit
def _order(x):
    """int32 that sorts like the float32 x; the same operation on the bits leads back."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_of(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _merge(best, new):
    """The best len(best) of two blocks of keys; `best` is and stays descending."""
    if tl.max(new, axis=0) > tl.min(best, axis=0):
        # Of a descending and an ascending sequence the larger of each pair are the larger half of all.
        best = tl.sort(tl.maximum(best, tl.sort(new, descending=False)), descending=True)
    return best


@triton.jit
def _member(address, count, values, ask):
    """Whether each of `values` is in the ascending int64 list at `address`."""
    held = address.to(tl.pointer_type(tl.int64))
    low = tl.zeros_like(values)
    high = low + count
    while tl.max(high - low, axis=0) > 0:
        middle = (low + high) // 2
        searching = low < high
        less = tl.load(held + middle, mask=searching & ask, other=0) < values
        low = tl.where(searching & less, middle + 1, low)
        high = tl.where(searching & (less == 0), middle, high)
    return ask & (low < count) & (tl.load(held + low, mask=ask & (low < count), other=-1) == values)


@triton.jit
def _allowed(plane, edge, ask):
    """Whether the plane of this request allows each edge. Row of `plane`: as in `arrays.plane_table`."""
    bits, dead, num_dead = tl.load(plane), tl.load(plane + 1), tl.load(plane + 2)
    alive, num_alive = tl.load(plane + 3), tl.load(plane + 4)
    ok = ask
    if num_alive >= 0:
        ok = _member(alive, num_alive, edge, ask)
    else:
        if bits != 0:
            byte = tl.load(bits.to(tl.pointer_type(tl.uint8)) + (edge >> 3), mask=ask, other=0).to(tl.int64)
            ok = ok & (((byte >> (edge & 7)) & 1) == 1)
        if num_dead > 0:
            ok = ok & (_member(dead, num_dead, edge, ask) == 0)
    return ok


@triton.jit
def _children(
    codes, code_mask, first, last, start, plane, TAIL: tl.constexpr, PLANES: tl.constexpr, SORT: tl.constexpr
):
    """(offset, code, whether it is an allowed child) of a block of the edges, or leaves, first .. last."""
    offset = start + tl.arange(0, SORT).to(tl.int64)
    edge = first + offset
    ok = edge < last
    code = tl.load(codes + edge, mask=ok, other=0).to(tl.int64) & code_mask
    if TAIL:
        before = tl.load(codes + edge - 1, mask=ok & (offset > 0), other=0).to(tl.int64) & code_mask
        ok = ok & ((offset == 0) | (before != code))
    if PLANES:
        allowed = _allowed(plane, edge, ok)
        if TAIL:
            # A run of leaves is allowed when any of them is.
            end = edge + 1
            after = tl.load(codes + end, mask=ok & (end < last), other=0).to(tl.int64) & code_mask
            more = ok & (allowed == 0) & (end < last) & (after == code)
            while tl.max(more.to(tl.int32), axis=0) > 0:
                allowed = allowed | _allowed(plane, end, more)
                end += 1
                after = tl.load(codes + end, mask=more & (end < last), other=0).to(tl.int64) & code_mask
                more = more & (allowed == 0) & (end < last) & (after == code)
        ok = ok & allowed
    return offset, code, ok


@triton.jit
def _log_normaliser(row, stride, width, count, BLOCK: tl.constexpr):
    """(log_z of the first `count` of a row, whether the row holds NaN or +inf); summed in float64 and rounded once."""
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at * stride, mask=at < width, other=float("-inf")).to(tl.float32)
        wrong = wrong | ((x < float("inf")) == 0).to(tl.int32)
        top = tl.where((x > top) & (at < count), x, top)
    highest = tl.max(top, axis=0)
    shift = tl.where(highest > float("-inf"), highest, 0.0).to(tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at * stride, mask=at < count, other=float("-inf")).to(tl.float32)
        total += tl.exp(x.to(tl.float64) - shift)
    return (tl.log(tl.sum(total, axis=0)) + shift).to(tl.float32), tl.max(wrong, axis=0)


@triton.jit
def _log_normaliser_of_children(
    row, stride, codes, code_mask, first, last, plane, TAIL: tl.constexpr, PLANES: tl.constexpr, SORT: tl.constexpr
):
    """log_z over the allowed children."""
    top = tl.full([SORT], float("-inf"), tl.float32)
    for start in range(0, (last - first).to(tl.int32), SORT):
        _, code, ok = _children(codes, code_mask, first, last, start, plane, TAIL, PLANES, SORT)
        x = tl.load(row + code * stride, mask=ok, other=float("-inf")).to(tl.float32)
        top = tl.where(x > top, x, top)
    highest = tl.max(top, axis=0)
    shift = tl.where(highest > float("-inf"), highest, 0.0).to(tl.float64)
    total = tl.zeros([SORT], tl.float64)
    for start in range(0, (last - first).to(tl.int32), SORT):
        _, code, ok = _children(codes, code_mask, first, last, start, plane, TAIL, PLANES, SORT)
        x = tl.load(row + code * stride, mask=ok, other=float("-inf")).to(tl.float32)
        total += tl.exp(x.to(tl.float64) - shift)
    return (tl.log(tl.sum(total, axis=0)) + shift).to(tl.float32)


# Only the distances between logits decide how fast they can be read; all else would be compiled again for nothing.
@triton.jit(
    do_not_specialize=[
        "width", "columns", "root_lo", "root_hi", "code_mask", "end_code", "plane_stride", "beams", "M", "S", "level",
    ],
    do_not_specialize_on_alignment=[
        "given_z", "score", "lo", "hi", "codes", "planes", "modes", "keys", "bad", "end_keys", "end_edges",
    ],
)  # fmt: skip
def _rank_children(
    logits, stride_b, stride_m, stride_v, width, columns, given_z,
    score, lo, hi, root_lo, root_hi,
    codes, code_mask, end_code, planes, plane_stride, modes,
    keys, bad, end_keys, end_edges, level, beams, M, S,
    ROOT: tl.constexpr, TAIL: tl.constexpr, ENDS: tl.constexpr, PLANES: tl.constexpr, MODES: tl.constexpr,
    HAS_Z: tl.constexpr, P: tl.constexpr, SORT: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // beams
    m = row % beams
    at = b * M + m
    x_row = logits + b * stride_b + m * stride_m
    plane = planes + b * plane_stride
    if ROOT:
        first, last = tl.full([], root_lo, tl.int64), tl.full([], root_hi, tl.int64)
        total = tl.full([], 0.0, tl.float32)
    else:
        first, last, total = tl.load(lo + at), tl.load(hi + at), tl.load(score + at)
    log_z, wrong = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)
    if first < last:
        mode = tl.full([], 0, tl.int32)
        if MODES:
            mode = tl.load(modes + b)
        count = tl.where(mode == OVER_LEVEL, columns, width)
        log_z, wrong = _log_normaliser(x_row, stride_v, width, count, BLOCK)
        if HAS_Z:
            given = tl.load(given_z + row)
            wrong = wrong | ((given < float("inf")) == 0).to(tl.int32)
            log_z = tl.where(mode == 0, given, log_z)
        if MODES:  # noqa: SIM102  (decided when it is compiled, the next one when it runs)
            if mode == OVER_CHILDREN:
                log_z = _log_normaliser_of_children(
                    x_row, stride_v, codes, code_mask, first, last, plane, TAIL, PLANES, SORT
                )
        log_z = tl.where(log_z == float("-inf"), float("inf"), log_z)  # no code has any probability
    tl.store(bad + at, wrong)

    if ENDS:
        # The end code is the largest of a level, so the child that ends is the last, and one leaf.
        edge = last - 1
        ends = (first < last) & (
            (tl.load(codes + edge, mask=first < last, other=0).to(tl.int64) & code_mask) == end_code
        )
        end_x = tl.load(x_row + end_code * stride_v, mask=ends, other=float("-inf")).to(tl.float32)
        end_child = total + tl.minimum(end_x - log_z, 0.0)
        end_key = (_order(end_child).to(tl.int64) << 32) | (LOW - (level.to(tl.int64) * M + m))
        end_key = tl.where(ends & (end_child > float("-inf")), end_key, ABSENT)
        if PLANES:
            one = edge + tl.zeros([1], tl.int64)
            allowed = tl.max(_allowed(plane, one, one >= first).to(tl.int32), axis=0)
            end_key = tl.where(allowed != 0, end_key, ABSENT)
        tl.store(end_keys + at, end_key)
        tl.store(end_edges + at, edge)
        last = tl.where(ends, edge, last)

    best = tl.full([SORT], ABSENT, tl.int64)
    for start in range(0, (last - first).to(tl.int32), SORT):
        offset, code, ok = _children(codes, code_mask, first, last, start, plane, TAIL, PLANES, SORT)
        x = tl.load(x_row + code * stride_v, mask=ok, other=float("-inf")).to(tl.float32)
        child = total + tl.minimum(x - log_z, 0.0)
        key = (_order(child).to(tl.int64) << 32) | (LOW - (m * S + offset))
        key = tl.where(ok & (child > float("-inf")), key, ABSENT)
        if ONE_BLOCK:
            best = key  # all of them are handed on, in any order
        else:
            best = _merge(best, key)
    place = tl.arange(0, SORT)
    tl.store(keys + row * P + place, best, mask=place < P)


@triton.jit(
    do_not_specialize=["root_lo", "root_hi", "code_mask", "level", "beams", "M", "S"],
    do_not_specialize_on_alignment=[
        "keys", "bad", "end_keys", "ended", "widths", "lo", "hi", "codes", "spans", "new_score", "new_lo", "new_hi",
        "new_codes", "new_parents", "bound", "failed",
    ],
)  # fmt: skip
def _keep_best(
    keys, bad, end_keys, ended, widths, lo, hi, root_lo, root_hi, codes, code_mask, spans,
    new_score, new_lo, new_hi, new_codes, new_parents, bound, failed,
    level, beams, M, S,
    ROOT: tl.constexpr, LAST: tl.constexpr, TAIL: tl.constexpr, SPANS: tl.constexpr, HAS_END: tl.constexpr,
    ENDS: tl.constexpr, P: tl.constexpr, SORT: tl.constexpr, BEAMS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    beam = tl.arange(0, BEAMS)
    wrong = tl.max(tl.load(bad + b * M + beam, mask=beam < beams, other=0), axis=0)
    place = tl.arange(0, SORT)
    best = tl.full([SORT], ABSENT, tl.int64)
    count = beams * P
    for start in range(0, count, SORT):
        at = start + place
        best = _merge(best, tl.load(keys + b * count + at, mask=at < count, other=ABSENT))
    width = tl.load(widths + b)
    found = (best != ABSENT) & (wrong == 0)
    if HAS_END:
        number = tl.arange(0, KEEP)
        held = tl.full([KEEP], ABSENT, tl.int64)
        if ROOT == 0:
            held = tl.load(ended + b * KEEP + number)
        if ENDS:
            held = _merge(held, tl.load(end_keys + b * M + number, mask=number < beams, other=ABSENT))
        held = tl.where((number < width) & (wrong == 0), held, ABSENT)
        tl.store(ended + b * KEEP + number, held)
        # Only what beats the last of them, where they are all there, can come into the result.
        least = tl.max(tl.where(number == width - 1, held, ABSENT), axis=0)
        found = found & ((best >> 32) > (least >> 32))
    ok = found & (place < width)

    lost = tl.max(tl.where(found & (place == width), best, ABSENT), axis=0)
    highest = tl.where(lost == ABSENT, float("-inf"), _score_of(lost))
    if LAST:
        highest = float("-inf")
    if ROOT:
        before, since = tl.full([], float("-inf"), tl.float32), tl.full([], -1, tl.int32)
    else:
        before, since = tl.load(bound + b), tl.load(failed + b)
    tl.store(bound + b, tl.where(wrong != 0, float("-inf"), tl.maximum(before, highest)))
    tl.store(failed + b, tl.where(wrong != 0, level, since))

    number = LOW - (best & LOW)
    parent = number // S
    if ROOT:
        first, last = tl.full([SORT], root_lo, tl.int64), tl.full([SORT], root_hi, tl.int64)
    else:
        first = tl.load(lo + b * M + parent, mask=ok, other=0)
        last = tl.load(hi + b * M + parent, mask=ok, other=0)
    edge = first + number % S
    code = tl.load(codes + edge, mask=ok, other=0).to(tl.int64) & code_mask
    end = edge + 1
    if TAIL:
        after = tl.load(codes + end, mask=ok & (end < last), other=0).to(tl.int64) & code_mask
        more = ok & (end < last) & (after == code)
        while tl.max(more.to(tl.int32), axis=0) > 0:
            end = tl.where(more, end + 1, end)
            after = tl.load(codes + end, mask=more & (end < last), other=0).to(tl.int64) & code_mask
            more = more & (end < last) & (after == code)
    if SPANS:
        end = tl.load(spans + edge + 1, mask=ok, other=0).to(tl.int64)
        edge = tl.load(spans + edge, mask=ok, other=0).to(tl.int64)
    at = b * M + place
    inside = place < M
    tl.store(new_score + at, tl.where(ok, _score_of(best), float("-inf")), mask=inside)
    tl.store(new_lo + at, tl.where(ok, edge, 0), mask=inside)
    tl.store(new_hi + at, tl.where(ok, end, 0), mask=inside)
    tl.store(new_codes + at, tl.where(ok, code, -1), mask=inside)
    tl.store(new_parents + at, tl.where(ok, parent, -1), mask=inside)


# ---- the search

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # scores [B, M], codes [B, M, L], leaves [B, M]


class Search:
    """See `trieton.search.kernels`. The object may be kept and its steps captured in a CUDA graph; `result` waits."""

    def __init__(
        self,
        index: StaticIndex,
        widths: np.ndarray,
        planes: Sequence[Plane | None],
        normalise: np.ndarray | None = None,
        *,
        any_planes: bool = False,
    ) -> None:
        """As every kernel's; with `any_planes` a search may be restarted with planes and other normalisers."""
        self.held = _on_device(index)
        device, batch, levels, width = self.held.device, len(widths), index.num_levels, int(widths.max())
        if width > MAX_BEAM:
            raise ValueError(f"beam_width: the gpu kernel takes at most {MAX_BEAM}, got {width}; use kernel='torch'")
        self.index, self.shape, self.level = index, (batch, width), 0
        self.root = tuple(map(int, index.row_ptr[0][:2]))
        self.has_planes = any_planes or any(plane is not None for plane in planes)
        self.has_modes = any_planes or normalise is not None
        self.keep = triton.next_power_of_2(width + 1)  # one more than the beam: the best that is lost is the bound
        # P, children that each beam hands on; S, the stride of their numbers.
        self.shares = [min(self.keep, triton.next_power_of_2(max(s, 1))) for s in self.held.most_children]
        if max(max(self.held.most_children), levels) * width >= 2**32:
            raise ValueError(f"beam width {width}: too wide for a level with {max(self.held.most_children)} children")
        self.widths = torch.empty(batch, dtype=torch.int64, device=device)
        self.modes = torch.empty(batch, dtype=torch.int32, device=device)
        plane_levels = index.head_levels + (index.head_levels < levels)
        self.planes = torch.empty((batch, plane_levels, 5), dtype=torch.int64, device=device)
        self.restart(widths, planes, normalise)
        self.score = torch.empty((2, batch, width), dtype=torch.float32, device=device)  # written and read in turn
        self.lo, self.hi = torch.empty((2, 2, batch, width), dtype=torch.int64, device=device)
        self.codes, self.parents = torch.empty((2, levels, batch, width), dtype=torch.int64, device=device)
        self.keys = torch.empty(batch * width * max(self.shares), dtype=torch.int64, device=device)
        self.bad = torch.empty((batch, width), dtype=torch.int32, device=device)
        self.bound = torch.empty(batch, dtype=torch.float32, device=device)
        self.failed = torch.empty(batch, dtype=torch.int32, device=device)
        some = index.has_end
        self.ended = torch.empty((batch, self.keep if some else 1), dtype=torch.int64, device=device)
        self.end_keys = torch.empty((batch, width if some else 1), dtype=torch.int64, device=device)
        self.end_edges = torch.zeros((levels if some else 1, batch, width), dtype=torch.int64, device=device)

    def restart(self, widths: np.ndarray, planes: Sequence[Plane | None], normalise: np.ndarray | None = None) -> None:
        """Make it the search of other requests: as many, none wider, in the same memory."""
        self.kept_alive = [_plane_on_device(plane, self.index, self.held.device) for plane in planes]
        _send(torch.from_numpy(widths.astype(np.int64)), self.widths)
        modes = np.zeros(len(widths), np.int32) if normalise is None else normalise.astype(np.int32)
        _send(torch.from_numpy(modes), self.modes)
        _send(torch.tensor([rows for _, rows in self.kept_alive], dtype=torch.int64), self.planes)

    def step(self, level: int, logits: Any, log_z: Any | None) -> tuple[torch.Tensor, torch.Tensor]:
        index, held, device = self.index, self.held, self.held.device
        (batch, width), self.level = self.shape, level
        if not (isinstance(logits, torch.Tensor) and logits.dtype in (torch.float32, torch.float16, torch.bfloat16)):
            logits = as_tensor(logits, device)
        logits = logits.to(device)
        given_z = self.bound if log_z is None else as_tensor(log_z, device).contiguous()
        beams, root, last, tail = logits.shape[1], level == 0, level == index.num_levels - 1, level >= index.head_levels
        old, new = (level + 1) % 2, level % 2
        codes, code_mask = held.codes[level]
        spans = held.spans[level]
        share, stride = self.shares[level], max(held.most_children[level], 1)
        sort = share if stride <= share else max(share, min(MAX_SORT, triton.next_power_of_2(stride)))
        ends = index.end_code(level) >= 0 and not last
        planes = self.planes[:, min(level, index.head_levels)]
        _rank_children[(batch * beams,)](
            logits, *logits.stride(), logits.shape[2], index.width(level), given_z,
            self.score[old], self.lo[old], self.hi[old], *self.root,
            codes, code_mask, max(index.end_code(level), 0), planes, planes.stride(0), self.modes,
            self.keys, self.bad, self.end_keys, self.end_edges[level if ends else 0], level, beams, width, stride,
            ROOT=root, TAIL=tail, ENDS=ends, PLANES=self.has_planes, MODES=self.has_modes, HAS_Z=log_z is not None,
            P=share, SORT=sort, ONE_BLOCK=stride <= share, BLOCK=ROW_BLOCKS[logits.shape[2] > ROW_BLOCKS[0]],
            num_warps=_warps(sort),
        )  # fmt: skip
        sort = max(self.keep, min(MAX_SORT, triton.next_power_of_2(beams * share)))
        _keep_best[(batch,)](
            self.keys, self.bad, self.end_keys, self.ended, self.widths, self.lo[old], self.hi[old], *self.root, codes,
            code_mask, codes if spans is None else spans,
            self.score[new], self.lo[new], self.hi[new], self.codes[level], self.parents[level],
            self.bound, self.failed, level, beams, width, stride,
            ROOT=root, LAST=last, TAIL=tail, SPANS=spans is not None, HAS_END=index.has_end, ENDS=ends,
            P=share, SORT=sort, BEAMS=triton.next_power_of_2(beams), KEEP=self.keep,
            num_warps=_warps(sort),
        )  # fmt: skip
        return self.codes[level], self.parents[level]

    def lives(self) -> bool:
        """Looked at only where semantic IDs end at different levels, because looking waits for the device."""
        return not self.index.has_end or bool((self.codes[self.level, :, 0] >= 0).any())

    def result(self) -> Beams:
        found = self._through_all_levels()
        if self.index.has_end:
            found = self._merged(self._ended_before(), found)
        # Copied, because the search may be restarted in its memory.
        return Beams(*(a.to("cpu", copy=True).numpy() for a in (*found, self.bound, self.failed)))

    def _through_all_levels(self) -> Results:
        """The beams behind the last level."""
        now = self.level % 2
        live = self.hi[now] > self.lo[now]
        leaves = torch.where(live, self.lo[now], -1)
        place = torch.arange(self.shape[1], device=live.device).expand_as(live)
        return self.score[now], self._codes(live, torch.full_like(place, self.index.num_levels), place), leaves

    def _ended_before(self) -> Results:
        """What took an end code before the last level, best first."""
        batch, width = self.shape
        keys = self.ended[:, :width]
        real, number = keys != _ABSENT, (2**32 - 1) - (keys & (2**32 - 1))
        order = (keys >> 32).int()
        scores = torch.where(real, (order ^ ((order >> 31) & 0x7FFFFFFF)).view(torch.float32), float("-inf"))
        level, place = torch.where(real, number // width, 0), torch.where(real, number % width, 0)
        leaf = self.end_edges[level, torch.arange(batch, device=keys.device)[:, None], place]
        for below, spans in enumerate(self.held.spans):  # one state below another, down to the last that is stored
            if spans is not None:
                deeper = real & (level <= below)
                leaf = torch.where(deeper, spans[torch.where(deeper, leaf, 0)].long(), leaf)
        return scores, self._codes(real, level, place), torch.where(real, leaf, -1)

    def _codes(self, real: torch.Tensor, levels: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Semantic IDs int32 [B, M, L]: of each the codes before its level, which led to a place among the beams."""
        out = torch.empty((*self.shape, self.index.num_levels), dtype=torch.int32, device=place.device)
        for level in range(self.index.num_levels - 1, -1, -1):
            held = real & (level < levels)
            code = self.codes[level].gather(1, place)
            out[:, :, level] = torch.where(held & (code != self.index.end_code(level)), code, -1)
            place = torch.where(held, self.parents[level].gather(1, place), place)
        return out

    def _merged(self, first: Results, second: Results) -> Results:
        """The best of two lists; the first wins ties."""
        scores, codes, leaves = (torch.cat(pair, dim=1) for pair in zip(first, second, strict=True))
        best, order = scores.sort(dim=1, descending=True, stable=True)
        best, order = best[:, : self.shape[1]], order[:, : self.shape[1]]
        inside = torch.arange(self.shape[1], device=best.device) < self.widths[:, None]
        leaves = torch.where(inside, leaves.gather(1, order), -1)
        codes = codes.gather(1, order[:, :, None].expand(-1, -1, codes.shape[2]))
        return torch.where(inside, best, float("-inf")), torch.where(leaves[:, :, None] >= 0, codes, -1), leaves


class _DeviceIndex:
    """The trie's tensors on the device, and how many children a state of each level has at most."""

    def __init__(self, index: StaticIndex, device: torch.device) -> None:
        self.device = device
        self.codes: list[tuple[torch.Tensor, int]] = []  # signed, because torch knows little of unsigned; and its mask
        self.spans: list[torch.Tensor | None] = []
        self.most_children: list[int] = []
        opens = None  # tail levels: whether a leaf is the first of its state
        for level in range(index.num_levels):
            tail = level >= index.head_levels
            held = index.tail[level - index.head_levels] if tail else index.codes[level]
            codes = torch.from_numpy(held.view(f"i{held.itemsize}")).to(device)
            self.codes.append((codes, (1 << 8 * held.itemsize) - 1))
            has_spans = not tail and level + 1 < len(index.row_ptr)
            self.spans.append(torch.from_numpy(index.row_ptr[level + 1]).to(device) if has_spans else None)
            if level <= index.head_levels and level < len(index.row_ptr):
                states = torch.from_numpy(index.row_ptr[level]).to(device)
            if tail:
                if opens is None:
                    opens = torch.zeros(index.num_leaves + 1, dtype=torch.bool, device=device)
                    opens[states.long()] = True
                states = opens.nonzero().flatten()
                opens[1:-1] |= codes[1:] != codes[:-1]
            self.most_children.append(int(states.diff().max()) if len(states) > 1 else 0)


_indexes: WeakKeyDictionary[StaticIndex, _DeviceIndex] = WeakKeyDictionary()
_planes: WeakKeyDictionary[Plane, tuple[list[torch.Tensor], list[tuple[int, ...]]]] = WeakKeyDictionary()


def _on_device(index: StaticIndex) -> _DeviceIndex:
    if index not in _indexes:
        device = torch.device(index.device)
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("kernel 'gpu' needs an index on a GPU: StaticIndex.load(path, device='cuda')")
        _indexes[index] = _DeviceIndex(index, device)
    return _indexes[index]


def _plane_on_device(
    plane: Plane | None, index: StaticIndex, device: torch.device
) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    """The tensors of a plane, and the table of their addresses as in `arrays.plane_table`."""
    levels = index.head_levels + (index.head_levels < index.num_levels)
    if plane is None:
        return [], [(0, 0, 0, 0, -1)] * levels
    if plane not in _planes:
        tensors: list[torch.Tensor] = []

        def send(array: np.ndarray) -> int:
            tensors.append(torch.from_numpy(array).to(device))
            return tensors[-1].data_ptr()

        absent = [None] * levels
        rows: list[tuple[int, ...]] = [
            (
                0 if bits is None else send(bits),
                *((0, 0) if dead is None else (send(dead), len(dead))),
                *((0, -1) if alive is None else (send(alive), len(alive))),
            )
            for bits, dead, alive in zip(plane.bits, plane.dead or absent, plane.alive or absent, strict=True)
        ]
        _planes[plane] = tensors, rows
    return _planes[plane]


def _warps(keys: int) -> int:
    """Warps of a program that sorts so many keys at a time."""
    return MANY_WARPS if keys >= MANY_KEYS else 4


def _send(tensor: torch.Tensor, to: torch.Tensor) -> None:
    """Copy from the host into `to` without waiting for its device."""
    to.copy_(tensor.pin_memory() if to.is_cuda else tensor, non_blocking=True)
