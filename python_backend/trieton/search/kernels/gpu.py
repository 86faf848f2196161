"""The beam step in OpenAI Triton: two launches per level, nothing that waits for the device, usable in a CUDA graph.

    _rank_children  one program per beam: normaliser, children, plane, and the keys of the beam's best children
    _keep_best      one program per request: the best of all keys become the new beams

A key is one int64 that sorts like (score, then the order of enumeration): in the high half the float32 score, its bits
made order-preserving, and in the low half the number m * S + offset of the candidate, counted backwards, where no state
of the level has more than S children. So both launches rank plain integers, ties come out as in every other kernel, and
a key alone leads back to its parent and its edge.

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
from trieton.search.kernels import Beams
from trieton.search.kernels.arrays import NO_END, as_tensor

MAX_SORT = 1024  # keys that one program sorts at a time, unless the beam itself is wider
ROW_BLOCKS = (512, 2048)  # logits that a program reads at a time, for short rows and for long ones
_ABSENT = -(2**63)
ABSENT = tl.constexpr(_ABSENT)
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
def _log_normaliser(row, stride, width, BLOCK: tl.constexpr):
    """(log_z of a row, whether it holds NaN or +inf); summed in float64 and rounded once."""
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at * stride, mask=at < width, other=float("-inf")).to(tl.float32)
        wrong = wrong | ((x < float("inf")) == 0).to(tl.int32)
        top = tl.where(x > top, x, top)
    highest = tl.max(top, axis=0)
    shift = tl.where(highest > float("-inf"), highest, 0.0).to(tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at * stride, mask=at < width, other=float("-inf")).to(tl.float32)
        total += tl.exp(x.to(tl.float64) - shift)
    return (tl.log(tl.sum(total, axis=0)) + shift).to(tl.float32), tl.max(wrong, axis=0)


# Only the distances between logits decide how fast they can be read; all else would be compiled again for nothing.
@triton.jit(
    do_not_specialize=["width", "previous_end", "root_lo", "root_hi", "code_mask", "plane_stride", "beams", "M", "S"],
    do_not_specialize_on_alignment=[
        "given_z", "score", "lo", "hi", "previous", "codes", "planes", "keys", "bad",
    ],
)  # fmt: skip
def _rank_children(
    logits, stride_b, stride_m, stride_v, width, given_z,
    score, lo, hi, previous, previous_end, root_lo, root_hi,
    codes, code_mask, planes, plane_stride,
    keys, bad, beams, M, S,
    ROOT: tl.constexpr, TAIL: tl.constexpr, PLANES: tl.constexpr, HAS_Z: tl.constexpr,
    P: tl.constexpr, SORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // beams
    m = row % beams
    at = b * M + m
    x_row = logits + b * stride_b + m * stride_m
    if ROOT:
        first, last = tl.full([], root_lo, tl.int64), tl.full([], root_hi, tl.int64)
        total, ended = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)
    else:
        first, last, total = tl.load(lo + at), tl.load(hi + at), tl.load(score + at)
        ended = (tl.load(previous + at) == previous_end).to(tl.int32)
    log_z, wrong = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)
    if (first < last) & (ended == 0):
        log_z, wrong = _log_normaliser(x_row, stride_v, width, BLOCK)
        if HAS_Z:
            log_z = tl.load(given_z + row)
            wrong = wrong | ((log_z < float("inf")) == 0).to(tl.int32)
        log_z = tl.where(log_z == float("-inf"), float("inf"), log_z)  # no code has any probability
    tl.store(bad + at, wrong)

    best = tl.full([SORT], ABSENT, tl.int64)
    for start in range(0, (last - first).to(tl.int32), SORT):
        offset = start + tl.arange(0, SORT).to(tl.int64)
        edge = first + offset
        inside = edge < last
        code = tl.load(codes + edge, mask=inside, other=0).to(tl.int64) & code_mask
        x = tl.load(x_row + code * stride_v, mask=inside, other=float("-inf")).to(tl.float32)
        child = total + tl.where(ended != 0, 0.0, tl.minimum(x - log_z, 0.0))
        ok = inside & (child > float("-inf"))
        if TAIL:
            before = tl.load(codes + edge - 1, mask=inside & (offset > 0), other=0).to(tl.int64) & code_mask
            ok = ok & ((offset == 0) | (before != code))
        if PLANES:
            plane = planes + b * plane_stride
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
        key = (_order(child).to(tl.int64) << 32) | (LOW - (m * S + offset))
        key = tl.where(ok, key, ABSENT)
        if P == SORT:
            best = key  # one block holds all children
        else:
            best = _merge(best, key)
    place = tl.arange(0, SORT)
    tl.store(keys + row * P + place, best, mask=place < P)


@triton.jit(
    do_not_specialize=["root_lo", "root_hi", "code_mask", "level", "beams", "M", "S"],
    do_not_specialize_on_alignment=[
        "keys", "bad", "widths", "lo", "hi", "codes", "spans", "new_score", "new_lo", "new_hi", "new_codes",
        "new_parents", "bound", "failed",
    ],
)  # fmt: skip
def _keep_best(
    keys, bad, widths, lo, hi, root_lo, root_hi, codes, code_mask, spans,
    new_score, new_lo, new_hi, new_codes, new_parents, bound, failed,
    level, beams, M, S,
    ROOT: tl.constexpr, LAST: tl.constexpr, TAIL: tl.constexpr, SPANS: tl.constexpr,
    P: tl.constexpr, SORT: tl.constexpr, BEAMS: tl.constexpr,
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


class Search:
    """See `trieton.search.kernels`. The object may be kept and its steps captured in a CUDA graph; `result` waits."""

    def __init__(
        self, index: StaticIndex, widths: np.ndarray, planes: Sequence[Plane | None], *, any_planes: bool = False
    ) -> None:
        """As every kernel's; with `any_planes` a search without planes may be restarted with some."""
        self.held = _on_device(index)
        device, batch, levels, width = self.held.device, len(widths), index.num_levels, int(widths.max())
        self.index, self.batch, self.width = index, batch, width
        self.root = tuple(map(int, index.row_ptr[0][:2]))
        self.has_planes = any_planes or any(plane is not None for plane in planes)
        self.keep = triton.next_power_of_2(width + 1)  # one more than the beam: the best that is lost is the bound
        # P, children that each beam hands on; S, the stride of their numbers.
        self.shares = [min(self.keep, triton.next_power_of_2(max(s, 1))) for s in self.held.most_children]
        if max(self.held.most_children) * width >= 2**32:
            raise ValueError(f"beam width {width}: too wide for a level with {max(self.held.most_children)} children")
        self.widths = torch.empty(batch, dtype=torch.int64, device=device)
        plane_levels = index.head_levels + (index.head_levels < levels)
        self.planes = torch.empty((batch, plane_levels, 5), dtype=torch.int64, device=device)
        self.restart(widths, planes)
        self.score = torch.empty((2, batch, width), dtype=torch.float32, device=device)  # written and read in turn
        self.lo, self.hi = torch.empty((2, 2, batch, width), dtype=torch.int64, device=device)
        self.codes, self.parents = torch.empty((2, levels, batch, width), dtype=torch.int64, device=device)
        self.keys = torch.empty(batch * width * max(self.shares), dtype=torch.int64, device=device)
        self.bad = torch.empty((batch, width), dtype=torch.int32, device=device)
        self.bound = torch.empty(batch, dtype=torch.float32, device=device)
        self.failed = torch.empty(batch, dtype=torch.int32, device=device)

    def restart(self, widths: np.ndarray, planes: Sequence[Plane | None]) -> None:
        """Make it the search of other requests: as many, none wider, in the same memory."""
        self.kept_alive = [_plane_on_device(plane, self.index, self.held.device) for plane in planes]
        _send(torch.from_numpy(widths.astype(np.int64)), self.widths)
        _send(torch.tensor([rows for _, rows in self.kept_alive], dtype=torch.int64), self.planes)

    def step(self, level: int, logits: Any, log_z: Any | None) -> tuple[torch.Tensor, torch.Tensor]:
        index, held, device = self.index, self.held, self.held.device
        if not (isinstance(logits, torch.Tensor) and logits.dtype in (torch.float32, torch.float16, torch.bfloat16)):
            logits = as_tensor(logits, device)
        logits = logits.to(device)
        given_z = self.bound if log_z is None else as_tensor(log_z, device).contiguous()
        beams, root, tail = logits.shape[1], level == 0, level >= index.head_levels
        old, new = (level + 1) % 2, level % 2
        codes, code_mask = held.codes[level]
        spans = held.spans[level]
        share, stride = self.shares[level], max(held.most_children[level], 1)
        sort = share if stride <= share else max(share, min(MAX_SORT, triton.next_power_of_2(stride)))
        previous_end = index.end_code(level - 1) if level and index.end_code(level - 1) >= 0 else NO_END
        planes = self.planes[:, min(level, index.head_levels)]
        _rank_children[(self.batch * beams,)](
            logits, *logits.stride(), logits.shape[2], given_z,
            self.score[old], self.lo[old], self.hi[old], self.codes[level - 1], previous_end, *self.root,
            codes, code_mask, planes, planes.stride(0),
            self.keys, self.bad, beams, self.width, stride,
            ROOT=root, TAIL=tail, PLANES=self.has_planes, HAS_Z=log_z is not None,
            P=share, SORT=sort, BLOCK=ROW_BLOCKS[logits.shape[2] > ROW_BLOCKS[0]],
        )  # fmt: skip
        _keep_best[(self.batch,)](
            self.keys, self.bad, self.widths, self.lo[old], self.hi[old], *self.root, codes, code_mask,
            codes if spans is None else spans,
            self.score[new], self.lo[new], self.hi[new], self.codes[level], self.parents[level],
            self.bound, self.failed, level, beams, self.width, stride,
            ROOT=root, LAST=level == index.num_levels - 1, TAIL=tail, SPANS=spans is not None,
            P=share, SORT=max(self.keep, min(MAX_SORT, triton.next_power_of_2(beams * share))),
            BEAMS=triton.next_power_of_2(beams),
        )  # fmt: skip
        return self.codes[level], self.parents[level]

    def result(self) -> Beams:
        last = (self.index.num_levels - 1) % 2
        live = self.hi[last] > self.lo[last]
        leaves = torch.where(live, self.lo[last], -1)
        out = torch.empty((*live.shape, self.index.num_levels), dtype=torch.int32, device=live.device)
        place = torch.arange(self.width, device=live.device).expand_as(live)
        for level in range(self.index.num_levels - 1, -1, -1):
            code = self.codes[level].gather(1, place)
            keep = live & (code != self.index.end_code(level))
            out[:, :, level] = torch.where(keep, code, -1)
            place = torch.where(live, self.parents[level].gather(1, place), 0)
        found = (self.score[last], out, leaves, self.bound, self.failed)
        return Beams(*(a.to("cpu", copy=True).numpy() for a in found))  # the search may be restarted in its memory


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


def _send(tensor: torch.Tensor, to: torch.Tensor) -> None:
    """Copy from the host into `to` without waiting for its device."""
    to.copy_(tensor.pin_memory() if to.is_cuda else tensor, non_blocking=True)
