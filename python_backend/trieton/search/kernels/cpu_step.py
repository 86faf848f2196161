"""The compiled beam step of the CPU, in numba: without the interpreter's lock, without allocating, all types at once.

What makes it fast. The normaliser is one pass of a polynomial exp that LLVM turns into vectors of float64. Only
children that exist are ranked, in enumeration order, against the worst of the best M + 1 found so far (the extra one is
the bound): a child whose score does not beat it is done with after one comparison, a beam whose own score does not beat
it is not opened at all, and where most codes of a level exist the row of logits is compared as vectors.
The index and the planes are read in place, through their addresses, so that the element types of a catalogue need no
compilation of their own.

All in one file, because numba's cache on disk notices a change of the file that a function stands in and of no other.
"""

from math import log
from types import FunctionType
from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic

from trieton.compiled import cached_njit
from trieton.search.kernels import ALLOWED, VOCABULARY
from trieton.search.kernels.arrays import NO_END

F32, F64, I32, I64 = np.float32, np.float64, np.int32, np.int64
NEG_INF = np.float32(-np.inf)
ABS_BITS = np.int32(0x7FFFFFFF)
INF_ORDER = np.int32(0x7F800000)  # order of +inf; every NaN lies above it or below the order of -inf
NEG_INF_ORDER = np.int32(-0x7F800001)
LOW_BITS = (1 << 32) - 1
BLOCK = 64  # logits compared at a time where many codes exist
DENSE = 16  # as many codes as this for each that exists, and comparing all logits still pays

# 2**f = 1 + f * P(f) for |f| <= 1/2, P of degree 8 through Chebyshev nodes, none of them 0: relative error below 4e-14,
# far inside the one rounding to float32 that a normaliser gets.
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

# Without this numba counts references, atomically, wherever an array is passed on: more work than the search itself.
# Nothing here allocates, so there is nothing to count.
LEAN: Any = {"_nrt": False}


# ---- memory


@intrinsic
def _load(typingctx, address, dtype):
    """The number of type `dtype` at an address."""

    def generate(context, builder, signature, arguments):
        pointer = context.get_value_type(signature.return_type).as_pointer()
        return builder.load(builder.inttoptr(arguments[0], pointer))

    return dtype.dtype(types.int64, dtype), generate


@njit(**LEAN)
def _unsigned_at(address, size, i):
    """Element i of an array of unsigned integers of `size` bytes at `address`, as int64."""
    if size == 2:
        return I64(_load(address + 2 * i, np.uint16))
    if size == 1:
        return I64(_load(address + i, np.uint8))
    if size == 4:
        return I64(_load(address + 4 * i, np.uint32))
    return _load(address + 8 * i, np.int64)


@njit(**LEAN)
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


@njit(fastmath={"contract"}, **LEAN)
def _exp2(t):
    """2**t for t <= 1020; 2**-1000 for less than that. NaN stays NaN, because a comparison lets it through."""
    t = -1000.0 if t < -1000.0 else t
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


@njit(fastmath={"reassoc", "contract"}, **LEAN)
def _sum_exp(row):
    """Sum of exp(x), where what exceeds 700 counts as 700."""
    total = 0.0
    for i in range(row.size):
        x = row[i]
        total += _exp2(F64(F32(700) if x > F32(700) else x) * _LOG2E)
    return total


@njit(fastmath={"reassoc", "contract"}, **LEAN)
def _sum_exp_below(row, top):
    """Sum of exp(x - top), where nothing exceeds `top`."""
    total, shift = 0.0, top * _LOG2E
    for i in range(row.size):
        total += _exp2(F64(row[i]) * _LOG2E - shift)
    return total


@njit(**LEAN)
def _order(x):
    """int32 that sorts like the float32 x; its own inverse on the bits."""
    bits = F32(x).view(I32)
    return I32(bits ^ ((bits >> I32(31)) & ABS_BITS))


@njit(**LEAN)
def _from_order(order):
    return I32(order ^ ((order >> I32(31)) & ABS_BITS)).view(F32)


@njit(**LEAN)
def _range(row):
    """Lowest and highest order of a row."""
    bits = row.view(I32)
    low, high = I32(2147483647), I32(-2147483648)
    for i in range(bits.size):
        order = bits[i] ^ ((bits[i] >> I32(31)) & ABS_BITS)
        low, high = min(low, order), max(high, order)
    return low, high


@njit(**LEAN)
def _log_normaliser(row, given):
    """log_z of a row. `given`: the log_z that came with it, if any, as an array of one.

    +inf stands for log_z where no code has any probability, NaN where the row or the given log_z is not usable.
    """
    if given.size == 0:
        total = _sum_exp(row)
        if 2.0**-128 < total < 2.0**128:  # all the numbers are ordinary, so nothing has to be looked at twice
            return F32(log(total))
    low, high = _range(row)
    if high >= INF_ORDER or low < NEG_INF_ORDER or (given.size and not given[0] < F32(np.inf)):
        return F32(np.nan)
    if high == NEG_INF_ORDER or (given.size and given[0] == NEG_INF):
        return F32(np.inf)
    if given.size:
        return given[0]
    top = F64(_from_order(high))
    return F32(log(_sum_exp_below(row, top)) + top)


# ---- planes and children


@njit(**LEAN)
def _dead(plane, edge):
    if plane[NUM_DEAD] == 0:
        return False
    place = _search(plane[DEAD], I64(0), plane[NUM_DEAD], edge)
    return place < plane[NUM_DEAD] and _unsigned_at(plane[DEAD], 8, place) == edge


@njit(**LEAN)
def _allowed(plane, edge):
    if plane[NUM_ALIVE] >= 0:
        place = _search(plane[ALIVE], I64(0), plane[NUM_ALIVE], edge)
        return place < plane[NUM_ALIVE] and _unsigned_at(plane[ALIVE], 8, place) == edge
    if plane[BITS] != 0 and not (_unsigned_at(plane[BITS], 1, edge >> 3) >> (edge & 7)) & 1:
        return False
    return not _dead(plane, edge)


@njit(**LEAN)
def _mostly_empty(plane, lo, hi):
    """Whether three of four bytes that hold the bits lo .. hi are 0."""
    first, last = lo >> 3, (hi + 7) >> 3
    empty = 0
    for byte in range(first, last):
        if _unsigned_at(plane[BITS], 1, byte) == 0:
            empty += 1
    return empty * 4 >= (last - first) * 3


@njit(**LEAN)
def _any_allowed(plane, lo, hi):
    for edge in range(lo, hi):  # noqa: SIM110
        if _allowed(plane, edge):
            return True
    return False


@njit(**LEAN)
def _next_child(layout, plane, edge, hi):
    """The first allowed child among the edges, or runs of leaves, from `edge` on: its code, and the edge behind it.

    Code -1 where there is none.
    """
    while edge < hi:
        code, end = _unsigned_at(layout[CODES], layout[CODE_BYTES], edge), edge + 1
        while layout[TAIL] and end < hi and _unsigned_at(layout[CODES], layout[CODE_BYTES], end) == code:
            end += 1
        if _any_allowed(plane, edge, end):
            return code, end
        edge = end
    return I64(-1), hi


@njit(**LEAN)
def _log_normaliser_of_children(row, layout, plane, lo, hi):
    """log_z over the allowed children; +inf where none has any probability."""
    top = NEG_INF
    code, edge = _next_child(layout, plane, lo, hi)
    while code >= 0:
        top = max(top, row[code])
        code, edge = _next_child(layout, plane, edge, hi)
    if top == NEG_INF:
        return F32(np.inf)
    total, shift = 0.0, F64(top) * _LOG2E
    code, edge = _next_child(layout, plane, lo, hi)
    while code >= 0:
        total += _exp2(F64(row[code]) * _LOG2E - shift)
        code, edge = _next_child(layout, plane, edge, hi)
    return F32(log(total) + F64(top))


# ---- the best so far: a buffer in the order of enumeration, thinned to the best `keep` whenever it is full


@njit(**LEAN)
def _key(score, place):
    """int64 that sorts like (score, then what was found first)."""
    return (I64(_order(score)) << I64(32)) | (LOW_BITS - place)


@njit(**LEAN)
def _kth_largest(keys, count, k):
    """Hoare's quickselect; reorders keys[:count]."""
    low, high = 0, count - 1
    while low < high:
        a, b, c = keys[low], keys[(low + high) >> 1], keys[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while keys[i] > pivot:
                i += 1
            while keys[j] < pivot:
                j -= 1
            if i <= j:
                keys[i], keys[j] = keys[j], keys[i]
                i, j = i + 1, j - 1
        if k - 1 <= j:
            high = j
        elif k - 1 >= i:
            low = i
        else:
            break
    return keys[k - 1]


@njit(**LEAN)
def _thin(best):
    """Keep the best `keep` of the buffer, in their order; returns the new threshold."""
    scores, found, keys, _, counts = best
    count, keep = counts[0], counts[1]
    for i in range(count):
        keys[i] = _key(scores[i], i)
    worst = _kth_largest(keys, count, keep)
    kept = 0
    for i in range(count):
        if _key(scores[i], i) >= worst:
            scores[kept] = scores[i]
            for column in range(4):
                found[kept, column] = found[i, column]
            kept += 1
    counts[0] = kept
    return _from_order(I32(worst >> I64(32)))


@njit(**LEAN)
def _push(best, threshold, score, parent, code, lo, hi):
    """Add a candidate whose score beats the threshold; returns the threshold from now on."""
    scores, found, _, _, counts = best
    place = counts[0]
    scores[place] = score
    found[place, 0], found[place, 1], found[place, 2], found[place, 3] = parent, code, lo, hi
    counts[0] = place + 1
    counts[2] += 1
    return _thin(best) if place + 1 == scores.size else threshold


@njit(**LEAN)
def _rank(best):
    """Write the places of the best, best first, into `slots`; returns how many there are."""
    scores, _, keys, slots, counts = best
    if counts[0] > counts[1]:
        _thin(best)
    count = counts[0]
    for i in range(count):
        keys[i] = _key(scores[i], i)
    for i in range(count):  # counting who is better runs in vectors and beats sorting up to thousands
        better = 0
        for j in range(count):
            better += keys[j] > keys[i]
        slots[better] = i
    return count


# ---- children of one beam: (parent, score, row of logits, log_z, span)


@njit(**LEAN)
def _total(beam, code):
    """Score of the child `code`."""
    _, score, row, log_z, _, _ = beam
    return score + min(F32(0), row[code] - log_z)


@njit(**LEAN)
def _least_logit(threshold, beam):
    """A logit that no child can beat the threshold without exceeding; a little low, for what rounding may add."""
    _, score, _, log_z, _, _ = beam
    return F32(threshold - score + log_z - F32(1e-6) * (abs(threshold) + abs(score) + abs(log_z)))


@njit(**LEAN)
def _offer(best, threshold, beam, layout, plane, edge, stop):
    """Offer the edges from `edge` on whose code is below `stop`, one by one."""
    while edge < beam[5]:
        code = _unsigned_at(layout[CODES], layout[CODE_BYTES], edge)
        if code >= stop:
            break
        total = _total(beam, code)
        if total > threshold and _allowed(plane, edge):
            threshold = _push(best, threshold, total, beam[0], code, edge, edge + 1)
        edge += 1
    return threshold


@njit(**LEAN)
def _listed_edges(best, threshold, beam, layout, plane):
    """Offer those edges of a head level that a plane's list of alive edges names."""
    place = _search(plane[ALIVE], I64(0), plane[NUM_ALIVE], beam[4])
    while place < plane[NUM_ALIVE]:
        edge = _unsigned_at(plane[ALIVE], 8, place)
        if edge >= beam[5]:
            break
        code = _unsigned_at(layout[CODES], layout[CODE_BYTES], edge)
        total = _total(beam, code)
        if total > threshold:
            threshold = _push(best, threshold, total, beam[0], code, edge, edge + 1)
        place += 1
    return threshold


@njit(**LEAN)
def _dense_edges(best, threshold, beam, layout, plane, begin):
    """Offer the edges whose code is at least `begin`, where they are many: a block of logits at a time is compared as a
    vector, and only where one may pass are the edges of its codes looked up."""
    _, _, row, _, lo, hi = beam
    missing, least = layout[WIDTH] - (hi - lo), _least_logit(threshold, beam)
    for start in range(begin, layout[WIDTH], BLOCK):
        stop = min(start + BLOCK, layout[WIDTH])
        block, passed = row[start:stop], I32(0)
        for i in range(block.size):
            passed = I32(passed + I32(block[i] > least))
        if passed == 0:
            continue
        # The first edge of the block lies at most `missing` places before lo + start.
        edge, last = lo + max(0, start - missing), min(lo + start, hi)
        while edge < last:
            middle = (edge + last) >> 1
            if _unsigned_at(layout[CODES], layout[CODE_BYTES], middle) < start:
                edge = middle + 1
            else:
                last = middle
        threshold = _offer(best, threshold, beam, layout, plane, edge, stop)
        least = _least_logit(threshold, beam)
    return threshold


@njit(**LEAN)
def _edges(best, threshold, beam, layout, plane):
    """Offer the edges of a head level: one by one, or by blocks of logits where that is less to look at."""
    lo, hi = beam[4], beam[5]
    if (hi - lo) * DENSE < layout[WIDTH]:
        return _offer(best, threshold, beam, layout, plane, lo, layout[WIDTH])
    for edge in range(lo, hi):
        code = _unsigned_at(layout[CODES], layout[CODE_BYTES], edge)
        if threshold > NEG_INF:
            return _dense_edges(best, threshold, beam, layout, plane, code)
        total = _total(beam, code)
        if total > threshold and _allowed(plane, edge):
            threshold = _push(best, threshold, total, beam[0], code, edge, edge + 1)
    return threshold


@njit(**LEAN)
def _masked_edges(best, threshold, beam, layout, plane):
    """Offer the edges of a head level of which a plane has few: eight are passed over at once."""
    for byte in range(beam[4] >> 3, (beam[5] + 7) >> 3):
        bits = _unsigned_at(plane[BITS], 1, byte)
        if bits == 0:
            continue
        for edge in range(max(beam[4], byte << 3), min(beam[5], (byte + 1) << 3)):
            if not (bits >> (edge & 7)) & 1:
                continue
            code = _unsigned_at(layout[CODES], layout[CODE_BYTES], edge)
            total = _total(beam, code)
            if total > threshold and not _dead(plane, edge):
                threshold = _push(best, threshold, total, beam[0], code, edge, edge + 1)
    return threshold


@njit(**LEAN)
def _runs(best, threshold, beam, layout, plane):
    """Offer the runs of equal codes among the leaves of a tail level."""
    lo, hi = beam[4], beam[5]
    while lo < hi:
        code, end = _unsigned_at(layout[CODES], layout[CODE_BYTES], lo), lo + 1
        while end < hi and _unsigned_at(layout[CODES], layout[CODE_BYTES], end) == code:
            end += 1
        total = _total(beam, code)
        if total > threshold and _any_allowed(plane, lo, end):
            threshold = _push(best, threshold, total, beam[0], code, lo, end)
        lo = end
    return threshold


# ---- whole semantic IDs: a list of the best `width` that have ended, best first


@njit(**LEAN)
def _leaf_below(level, edge, table):
    """The leaf of an edge with the end code: one state below another, down to the last that is stored."""
    while level < table.shape[0] and table[level, SPANS] != 0:
        edge = _unsigned_at(table[level, SPANS], table[level, SPAN_BYTES], edge)
        level += 1
    return edge


@njit(**LEAN)
def _end(level, b, m, width, score, leaf, ended):
    """Put one in behind all that are as good; of more than `width` the last is lost."""
    scores, levels, parents, leaves, counts = ended
    place = counts[b]
    if place == width:
        if width == 0 or score <= scores[b, width - 1]:
            return
        place -= 1
    else:
        counts[b] += 1
    while place > 0 and scores[b, place - 1] < score:
        scores[b, place], levels[b, place] = scores[b, place - 1], levels[b, place - 1]
        parents[b, place], leaves[b, place] = parents[b, place - 1], leaves[b, place - 1]
        place -= 1
    scores[b, place], levels[b, place], parents[b, place], leaves[b, place] = score, level, m, leaf


@njit(**LEAN)
def _end_children(level, b, beams, width, logits, stride, table, plane, state, ended):
    """Take the children with the end code, the last of their beams, out of the spans and into the list.

    Returns the score that a beam has to exceed to come into the result.
    """
    score, lo, hi, _, _, log_z = state
    layout = table[level]
    for m in range(beams):
        edge = hi[b, m] - 1
        if edge < lo[b, m] or _unsigned_at(layout[CODES], layout[CODE_BYTES], edge) != layout[END]:
            continue
        hi[b, m] = edge
        row = logits[b * stride[0] + m * stride[1] :]
        total = _total((m, score[b, m], row, log_z[b, m], edge, edge), layout[END])
        if total > NEG_INF and _allowed(plane, edge):
            _end(level, b, m, width, total, _leaf_below(level, edge, table), ended)
    return _least(b, width, ended)


@njit(**LEAN)
def _least(b, width, ended):
    return ended[0][b, width - 1] if ended[4][b] == width else NEG_INF


# ---- one step


@njit(**LEAN)
def _choose(level, b, beams, threshold, logits, stride, table, plane, state, best):
    """Rank the children of request b that beat the threshold.

    Leaves the survivors sorted in `best` and returns how many there are.
    """
    score, lo, hi, _, _, log_z = state
    layout = table[level]
    for m in range(beams):
        if score[b, m] <= threshold:
            break  # beams are sorted and the dead come last
        if lo[b, m] >= hi[b, m]:
            continue  # its only child has ended
        row = logits[b * stride[0] + m * stride[1] :]
        beam = (m, score[b, m], row, log_z[b, m], lo[b, m], hi[b, m])
        if layout[TAIL]:
            threshold = _runs(best, threshold, beam, layout, plane)
        elif plane[NUM_ALIVE] >= 0:
            threshold = _listed_edges(best, threshold, beam, layout, plane)
        elif plane[BITS] != 0 and _mostly_empty(plane, lo[b, m], hi[b, m]):
            threshold = _masked_edges(best, threshold, beam, layout, plane)
        else:
            threshold = _edges(best, threshold, beam, layout, plane)
    return _rank(best)


@njit(**LEAN)
def _settle(level, b, count, table, state, best):
    """Write the first `count` survivors as the new beams of request b, and the dead behind them."""
    score, lo, hi, codes, parents, _ = state
    scores, found, _, slots, _ = best
    spans, size = table[level, SPANS], table[level, SPAN_BYTES]
    for i in range(count):
        slot = slots[i]
        score[b, i] = scores[slot]
        parents[level, b, i], codes[level, b, i] = found[slot, 0], found[slot, 1]
        first, last = found[slot, 2], found[slot, 3]
        if spans != 0:
            first, last = _unsigned_at(spans, size, first), _unsigned_at(spans, size, first + 1)
        lo[b, i], hi[b, i] = first, last
    for i in range(count, score.shape[1]):
        score[b, i], lo[b, i], hi[b, i] = NEG_INF, 0, 0
        codes[level, b, i] = parents[level, b, i] = -1


@njit(**LEAN)
def _normalise(level, b, m, row, given, layout, plane, mode, state):
    """Fill in log_z of one row; a row that nobody will read counts as usable."""
    _, lo, hi, _, _, log_z = state
    if lo[b, m] >= hi[b, m]:
        log_z[b, m] = 0
    elif mode == VOCABULARY:
        log_z[b, m] = _log_normaliser(row, given)
    else:
        low, high = _range(row)
        if high >= INF_ORDER or low < NEG_INF_ORDER or (given.size and not given[0] < F32(np.inf)):
            log_z[b, m] = F32(np.nan)
        elif mode == ALLOWED:
            log_z[b, m] = _log_normaliser_of_children(row, layout, plane, lo[b, m], hi[b, m])
        else:
            log_z[b, m] = _log_normaliser(row[: layout[WIDTH]], given[:0])


@njit(**LEAN)
def _advance_request(level, b, beams, logits, stride, table, plane, state, best, limits, ended):
    """The step of one request, once its rows are normalised."""
    log_z, (widths, failed, bound, _), (scores, _, _, slots, counts) = state[5], limits, best
    last = level + 1 == table.shape[0]
    counts[0], counts[1] = 0, widths[b] + (not last)  # before the last level one more: the bound
    usable, count = True, 0
    for m in range(beams):
        usable &= log_z[b, m] == log_z[b, m]
    if usable:
        if table[level, END] != NO_END and not last:
            least = _end_children(level, b, beams, widths[b], logits, stride, table, plane, state, ended)
        else:
            least = _least(b, widths[b], ended)
        count = _choose(level, b, beams, least, logits, stride, table, plane, state, best)
        if count > widths[b]:
            count = widths[b]
            bound[b] = max(bound[b], scores[slots[count]])
    else:
        failed[b], bound[b], ended[4][b] = level, NEG_INF, 0
    _settle(level, b, count, table, state, best)


def _advance(level, beams, width, by_request, logits, stride, given, table, planes, state, buffer, limits, ended):
    """One step of every request. `by_request`: share out whole requests among the threads, else first all rows."""
    scores, found, keys, slots, counts = buffer
    layout, modes = table[level], limits[3]
    if not by_request:
        for row in prange(counts.shape[0] * beams):
            b, m = row // beams, row % beams
            at, plane = b * stride[0] + m * stride[1], planes[b, layout[PLANE]]
            _normalise(level, b, m, logits[at : at + width], given[row : row + 1], layout, plane, modes[b], state)
    for b in prange(counts.shape[0]):
        plane = planes[b, layout[PLANE]]
        for m in range(beams if by_request else 0):
            at, row = b * stride[0] + m * stride[1], b * beams + m
            _normalise(level, b, m, logits[at : at + width], given[row : row + 1], layout, plane, modes[b], state)
        room = 2 * (limits[0][b] + (level + 1 < table.shape[0]))
        best = (scores[b, :room], found[b], keys[b], slots[b], counts[b])
        _advance_request(level, b, beams, logits, stride, table, plane, state, best, limits, ended)


advance = cached_njit(_advance, nogil=True, **LEAN)
# Under a name of its own, because numba files compiled code under the function's name whatever its options.
_advance_parallel = FunctionType(_advance.__code__, globals())
_advance_parallel.__qualname__ = "_advance_parallel"
advance_parallel = cached_njit(_advance_parallel, nogil=True, parallel=True)


@njit(**LEAN)
def _trace_one(b, i, level, m, codes, parents, table, out):
    """Write one semantic ID: what beam m chose at `level`, and its parents before; -1 behind it and for an end code."""
    for behind in range(level + 1, out.shape[2]):
        out[b, i, behind] = -1
    while level >= 0:
        code = codes[level, b, m]
        out[b, i, level] = -1 if code == table[level, END] else code
        m = parents[level, b, m]
        level -= 1


@cached_njit(nogil=True, **LEAN)
def trace(state, limits, ended, table, best, out, leaves):
    """Merge what ended before the last level and what came through it, both best first: what ended earlier wins ties.

    Follows the parents back: scores [B, M], semantic IDs [B, M, L] and leaves [B, M].
    """
    score, lo, hi, codes, parents, _ = state
    scores, levels, beams, held, counts = ended
    for b in range(out.shape[0]):
        early, late, width = 0, 0, limits[0][b]
        for i in range(out.shape[1]):
            lives = late < width and lo[b, late] < hi[b, late]
            if i < width and early < counts[b] and not (lives and score[b, late] > scores[b, early]):
                best[b, i], leaves[b, i], level = scores[b, early], held[b, early], levels[b, early]
                out[b, i, level] = -1
                _trace_one(b, i, level - 1, beams[b, early], codes, parents, table, out)
                early += 1
            elif i < width and lives:
                best[b, i], leaves[b, i] = score[b, late], lo[b, late]
                _trace_one(b, i, out.shape[2] - 1, late, codes, parents, table, out)
                late += 1
            else:
                best[b, i], leaves[b, i] = NEG_INF, -1
                for level in range(out.shape[2]):
                    out[b, i, level] = -1
