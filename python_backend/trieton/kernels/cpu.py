"""The beam step on the CPU, in numba: without the interpreter's lock, without allocating, all types in one compilation.

What makes it fast. The normaliser is one pass of a polynomial exp that LLVM turns into vectors of float64. Only
children that exist are ranked, in enumeration order, against a heap of the best M + 1 so far (the extra one is the
bound): a child whose score does not beat the worst of them is done with after one comparison, a beam whose own score
does not beat it is not opened at all, and where most codes of a level exist the row of logits is compared as vectors.
The index and the planes are read in place, through their addresses, so that the element types of a catalogue need no
compilation of their own.

All in one file, because numba's cache on disk notices a change of the file that a function stands in and of no other.
"""

import threading
from collections.abc import Sequence
from math import log
from typing import Any

import numpy as np
from numba import carray, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from trieton.index import StaticIndex
from trieton.kernels import Beams
from trieton.kernels.arrays import NO_END, as_array, level_table, plane_table, rows
from trieton.plane import Plane

F32, F64, I32, I64 = np.float32, np.float64, np.int32, np.int64
NEG_INF = np.float32(-np.inf)
ABS_BITS = np.int32(0x7FFFFFFF)
INF_ORDER = np.int32(0x7F800000)  # order of +inf; every NaN lies above it or below the order of -inf
NEG_INF_ORDER = np.int32(-0x7F800001)
LOW_BITS = (1 << 32) - 1
PARALLEL_WORK = 1 << 15  # logits of a step from which a second thread pays

# 2**f = 1 + f * P(f) for |f| <= 1/2, P of degree 8 through Chebyshev nodes: relative error below 3e-14, far inside the
# one rounding to float32 that a normaliser gets.
_P = tuple(
    np.polynomial.Chebyshev.interpolate(lambda f: np.expm1(f * np.log(2)) / f, 8, domain=[-0.5, 0.5000001])
    .convert(kind=np.polynomial.Polynomial)
    .coef.tolist()
)
_LOG2E = 1.4426950408889634
_ROUND = 1.5 * 2.0**52  # adding it leaves the nearest integer in the low bits

# Columns of `level_table` and `plane_table`.
CODES, CODE_BYTES, SPANS, SPAN_BYTES, TAIL, WIDTH, END, PLANE = range(8)  # one row per level of the index
BITS, DEAD, NUM_DEAD, ALIVE, NUM_ALIVE = range(5)  # one row per request and level of a plane


# ---- memory


@intrinsic
def _pointer(typingctx, address):
    """An integer address as the pointer that `carray` takes."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@njit
def _unsigned_at(address, size, i):
    """Element i of an array of unsigned integers of `size` bytes at `address`, as int64."""
    pointer = _pointer(address)
    if size == 2:
        return I64(carray(pointer, i + 1, np.uint16)[i])
    if size == 1:
        return I64(carray(pointer, i + 1, np.uint8)[i])
    if size == 4:
        return I64(carray(pointer, i + 1, np.uint32)[i])
    return carray(pointer, i + 1, np.int64)[i]


@njit
def _search(address, lo, hi, value):
    """First place in [lo, hi) of the ascending int64 array at `address` that holds at least `value`."""
    while lo < hi:
        middle = (lo + hi) >> 1
        if _unsigned_at(address, 8, middle) < value:
            lo = middle + 1
        else:
            hi = middle
    return lo


# ---- the normaliser


@njit(fastmath={"contract"})
def _exp2(t):
    t = max(t, -1000.0)
    shifted = t + _ROUND
    f = t - (shifted - _ROUND)
    p = _P[8] * f + _P[7]
    p = p * f + _P[6]
    p = p * f + _P[5]
    p = p * f + _P[4]
    p = p * f + _P[3]
    p = p * f + _P[2]
    p = p * f + _P[1]
    p = p * f + _P[0]
    p = p * f + 1.0
    exponent = F64(shifted).view(I64) << I64(52)
    return I64(F64(p).view(I64) + exponent).view(F64)


@njit(fastmath={"reassoc", "contract"})
def _sum_exp(row, top):
    total = 0.0
    for i in range(row.size):
        total += _exp2((F64(row[i]) - top) * _LOG2E)
    return total


@njit
def _order(x):
    """int32 that sorts like the float32 x; its own inverse on the bits."""
    bits = F32(x).view(I32)
    return I32(bits ^ ((bits >> I32(31)) & ABS_BITS))


@njit
def _from_order(order):
    return I32(order ^ ((order >> I32(31)) & ABS_BITS)).view(F32)


@njit
def _log_normaliser(row, given, has_given):
    """log_z of a row, +inf where no code has any probability; NaN when the row, or its given log_z, is not usable."""
    bits = row.view(I32)
    low, high = I32(2147483647), I32(-2147483648)
    for i in range(bits.size):
        order = bits[i] ^ ((bits[i] >> I32(31)) & ABS_BITS)
        low, high = min(low, order), max(high, order)
    if high >= INF_ORDER or low < NEG_INF_ORDER:
        return F32(np.nan)
    if has_given and not given < F32(np.inf):
        return F32(np.nan)
    if high == NEG_INF_ORDER or (has_given and given == NEG_INF):
        return F32(np.inf)
    if has_given:
        return given
    top = F64(_from_order(high))
    return F32(log(_sum_exp(row, top)) + top)


# ---- planes


@njit
def _allowed(plane, edge):
    if plane[NUM_ALIVE] >= 0:
        place = _search(plane[ALIVE], I64(0), plane[NUM_ALIVE], edge)
        return place < plane[NUM_ALIVE] and _unsigned_at(plane[ALIVE], 8, place) == edge
    if plane[BITS] != 0 and not (_unsigned_at(plane[BITS], 1, edge >> 3) >> (edge & 7)) & 1:
        return False
    if plane[NUM_DEAD] == 0:
        return True
    place = _search(plane[DEAD], I64(0), plane[NUM_DEAD], edge)
    return place == plane[NUM_DEAD] or _unsigned_at(plane[DEAD], 8, place) != edge


@njit
def _any_allowed(plane, lo, hi):
    for edge in range(lo, hi):  # noqa: SIM110
        if _allowed(plane, edge):
            return True
    return False


# ---- the best so far: a heap of keys, the worst on top


@njit
def _sift(keys, slots, count, place):
    key, slot = keys[place], slots[place]
    while True:
        child = 2 * place + 1
        if child >= count:
            break
        if child + 1 < count and keys[child + 1] < keys[child]:
            child += 1
        if key <= keys[child]:
            break
        keys[place], slots[place] = keys[child], slots[child]
        place = child
    keys[place], slots[place] = key, slot


@njit
def _heapify(keys, slots, count):
    for place in range(count // 2 - 1, -1, -1):
        _sift(keys, slots, count, place)


@njit
def _push(best, score, parent, code, lo, hi):
    """Offer a candidate whose score beats the threshold; returns the new threshold."""
    keys, slots, found, counts = best
    count, keep = counts[0], counts[1]
    # Of equal scores the one that came first wins: enumeration order is (parent, code).
    key = (I64(_order(score)) << I64(32)) | (LOW_BITS - counts[2])
    counts[2] += 1
    if count < keep:
        place, slot = count, count
        keys[place], slots[place] = key, slot
        count += 1
        counts[0] = count
        if count == keep:
            _heapify(keys, slots, count)
    else:
        slot = slots[0]
        keys[0] = key
        _sift(keys, slots, count, 0)
    found[slot, 0], found[slot, 1], found[slot, 2], found[slot, 3] = parent, code, lo, hi
    return _from_order(I32(keys[0] >> I64(32))) if count == keep else NEG_INF


# ---- children of one beam: (parent, score, row of logits, log_z, whether it has ended, span)


@njit
def _total(beam, code):
    """Score of the child `code`."""
    _, score, row, log_z, ended, _, _ = beam
    return score if ended else score + min(F32(0), row[code] - log_z)


@njit
def _edges(best, threshold, beam, layout, plane):
    """Offer the edges of a head level one by one."""
    for edge in range(beam[5], beam[6]):
        code = _unsigned_at(layout[CODES], layout[CODE_BYTES], edge)
        total = _total(beam, code)
        if total > threshold and _allowed(plane, edge):
            threshold = _push(best, total, beam[0], code, edge, edge + 1)
    return threshold


@njit
def _listed_edges(best, threshold, beam, layout, plane):
    """Offer those edges of a head level that a plane's list of alive edges names."""
    place = _search(plane[ALIVE], I64(0), plane[NUM_ALIVE], beam[5])
    while place < plane[NUM_ALIVE]:
        edge = _unsigned_at(plane[ALIVE], 8, place)
        if edge >= beam[6]:
            break
        code = _unsigned_at(layout[CODES], layout[CODE_BYTES], edge)
        total = _total(beam, code)
        if total > threshold:
            threshold = _push(best, total, beam[0], code, edge, edge + 1)
        place += 1
    return threshold


@njit
def _dense_edges(best, threshold, beam, layout, plane):
    """Offer the edges of a head level where they are most of its codes: compare all logits first, 64 at a time."""
    _, score, row, log_z, _, lo, hi = beam
    missing = layout[WIDTH] - (hi - lo)
    for start in range(0, layout[WIDTH], 64):
        stop = min(start + 64, layout[WIDTH])
        passed = I32(0)
        for code in range(start, stop):
            passed |= I32(score + min(F32(0), row[code] - log_z) > threshold)
        if not passed:
            continue
        for code in range(start, stop):
            total = _total(beam, code)
            if total > threshold:
                # The edge of a code lies at most `missing` places before lo + code.
                edge, last = lo + max(0, code - missing), min(lo + code, hi - 1)
                while edge < last:
                    middle = (edge + last) >> 1
                    if _unsigned_at(layout[CODES], layout[CODE_BYTES], middle) < code:
                        edge = middle + 1
                    else:
                        last = middle
                if _unsigned_at(layout[CODES], layout[CODE_BYTES], edge) == code and _allowed(plane, edge):
                    threshold = _push(best, total, beam[0], I64(code), edge, edge + 1)
    return threshold


@njit
def _runs(best, threshold, beam, layout, plane):
    """Offer the runs of equal codes among the leaves of a tail level."""
    lo, hi = beam[5], beam[6]
    while lo < hi:
        code, end = _unsigned_at(layout[CODES], layout[CODE_BYTES], lo), lo + 1
        while end < hi and _unsigned_at(layout[CODES], layout[CODE_BYTES], end) == code:
            end += 1
        total = _total(beam, code)
        if total > threshold and _any_allowed(plane, lo, end):
            threshold = _push(best, total, beam[0], code, lo, end)
        lo = end
    return threshold


# ---- one step


@njit
def _choose(level, b, beams, logits, stride, log_z, table, plane, state, best):
    """Rank the children of request b; leaves the survivors sorted in `best` and returns how many there are."""
    score, lo, hi, codes, _, _ = state
    keys, slots, _, counts = best
    layout = table[level]
    previous_end = table[level - 1, END] if level > 0 else NO_END
    threshold = NEG_INF
    for m in range(beams):
        if lo[b, m] >= hi[b, m] or score[b, m] <= threshold:
            break  # beams are sorted and the dead come last
        ended = level > 0 and codes[level - 1, b, m] == previous_end
        row = logits[b * stride[0] + m * stride[1] :]
        beam = (m, score[b, m], row, log_z[b, m], ended, lo[b, m], hi[b, m])
        if layout[TAIL]:
            threshold = _runs(best, threshold, beam, layout, plane)
        elif plane[NUM_ALIVE] >= 0:
            threshold = _listed_edges(best, threshold, beam, layout, plane)
        elif counts[0] == counts[1] and not ended and (hi[b, m] - lo[b, m]) * 4 >= layout[WIDTH]:
            threshold = _dense_edges(best, threshold, beam, layout, plane)
        else:
            threshold = _edges(best, threshold, beam, layout, plane)
    if counts[0] < counts[1]:
        _heapify(keys, slots, counts[0])
    for end in range(counts[0] - 1, 0, -1):  # the worst goes last: keys end up descending
        keys[0], keys[end] = keys[end], keys[0]
        slots[0], slots[end] = slots[end], slots[0]
        _sift(keys, slots, end, 0)
    return counts[0]


@njit
def _settle(level, b, count, table, state, best):
    """Write the first `count` survivors as the new beams of request b, and the dead behind them."""
    score, lo, hi, codes, parents, _ = state
    keys, slots, found, _ = best
    spans, size = table[level, SPANS], table[level, SPAN_BYTES]
    for i in range(count):
        slot = slots[i]
        score[b, i] = _from_order(I32(keys[i] >> I64(32)))
        parents[level, b, i], codes[level, b, i] = found[slot, 0], found[slot, 1]
        first, last = found[slot, 2], found[slot, 3]
        if spans != 0:
            first, last = _unsigned_at(spans, size, first), _unsigned_at(spans, size, first + 1)
        lo[b, i], hi[b, i] = first, last
    for i in range(count, score.shape[1]):
        score[b, i], lo[b, i], hi[b, i] = NEG_INF, 0, 0
        codes[level, b, i] = parents[level, b, i] = -1


def _advance(level, beams, width, logits, stride, given, log_z, table, planes, state, heap, limits):
    """One step of every request: first all rows, then all requests."""
    _, lo, hi, codes, _, bound = state
    keys, slots, found, counts = heap
    widths, failed = limits
    previous_end = table[level - 1, END] if level > 0 else NO_END
    for row in prange(widths.size * beams):
        b, m = row // beams, row % beams
        log_z[b, m] = 0
        if lo[b, m] < hi[b, m] and not (level > 0 and codes[level - 1, b, m] == previous_end):
            at = b * stride[0] + m * stride[1]
            has_given = given.size > 0
            log_z[b, m] = _log_normaliser(logits[at : at + width], given[row] if has_given else NEG_INF, has_given)
    for b in prange(widths.size):
        counts[b, 0], counts[b, 1], counts[b, 2] = 0, widths[b] + (level + 1 < table.shape[0]), 0
        best = (keys[b], slots[b], found[b], counts[b])
        usable = True
        for m in range(beams):
            usable &= log_z[b, m] == log_z[b, m]
        count = 0
        if usable:
            count = _choose(level, b, beams, logits, stride, log_z, table, planes[b, table[level, PLANE]], state, best)
            if count > widths[b]:
                count = widths[b]
                bound[b] = max(bound[b], _from_order(I32(keys[b, count] >> I64(32))))
        else:
            failed[b], bound[b] = level, NEG_INF
        _settle(level, b, count, table, state, best)


_serial = njit(_advance, nogil=True, cache=True)
_parallel = njit(_advance, nogil=True, cache=True, parallel=True)
# Not every threading layer of numba may be entered by two threads at once.
_one_at_a_time = threading.Lock()


@njit(nogil=True, cache=True)
def _trace(codes, parents, lo, hi, table, out, leaves):
    """Follow the parents back from the last level: semantic IDs [B, M, L] and leaves [B, M]."""
    for b in range(out.shape[0]):
        for i in range(out.shape[1]):
            live, m = lo[b, i] < hi[b, i], i
            leaves[b, i] = lo[b, i] if live else -1
            for level in range(out.shape[2] - 1, -1, -1):
                code = codes[level, b, m] if live else -1
                out[b, i, level] = -1 if code == table[level, END] else code
                m = parents[level, b, m] if live else 0


# ---- the search


class Search:
    """See `trieton.kernels`. Codes and parents of all levels are kept, so beams are never reordered."""

    def __init__(self, index: StaticIndex, widths: np.ndarray, planes: Sequence[Plane | None]) -> None:
        batch, levels, width = len(widths), index.num_levels, int(widths.max())
        self.table = level_table(index)
        self.planes = np.array([plane_table(plane, index) for plane in planes], np.int64)  # [B, plane levels, 5]
        self.kept_alive = (index, planes)  # their memory is read by address
        self.score = np.zeros((batch, width), np.float32)
        self.lo, self.hi = np.zeros((2, batch, width), np.int64)
        self.lo[:, 0], self.hi[:, 0] = index.row_ptr[0]
        self.codes, self.parents = np.empty((2, levels, batch, width), np.int32)
        self.bound = np.full(batch, NEG_INF)
        self.failed = np.full(batch, -1, np.int32)
        self.log_z = np.empty((batch, width), np.float32)
        self.heap = (
            np.empty((batch, width + 1), np.int64),  # keys: (order of the score, place in the enumeration reversed)
            np.empty((batch, width + 1), np.int32),  # slots of `found`
            np.empty((batch, width + 1, 4), np.int64),  # parent, code, span
            np.empty((batch, 3), np.int64),  # how many there are, how many to keep, how many were offered
        )
        self.state = (self.score, self.lo, self.hi, self.codes, self.parents, self.bound)
        self.limits = (np.ascontiguousarray(widths, np.int32), self.failed)

    def step(self, level: int, logits: Any, log_z: Any | None) -> tuple[np.ndarray, np.ndarray]:
        values, strides = rows(logits)
        batch, beams, width = logits.shape
        given = _NONE if log_z is None else np.ascontiguousarray(as_array(log_z)).reshape(-1)
        arguments = (
            level, beams, width, values, strides, given, self.log_z, self.table, self.planes, self.state, self.heap,
            self.limits,
        )  # fmt: skip
        if batch * beams * width < PARALLEL_WORK:
            _serial(*arguments)
        else:
            with _one_at_a_time:
                _parallel(*arguments)
        return self.codes[level], self.parents[level]

    def result(self) -> Beams:
        out = np.empty((*self.score.shape, len(self.table)), np.int32)
        leaves = np.empty(self.score.shape, np.int64)
        _trace(self.codes, self.parents, self.lo, self.hi, self.table, out, leaves)
        return Beams(self.score, out, leaves, self.bound, self.failed)


_NONE = np.zeros(0, np.float32)
