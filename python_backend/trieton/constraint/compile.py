"""Constraints: a boolean expression over named sets, with optional include and exclude lists, compiled to a `Plane`.

The allowed items are found first and carried up the trie, one bit per edge, so a search never enters a prefix below
which nothing is allowed: its result is that of searching a catalogue that holds the allowed items only. Expressions are
compiled once per index and kept (`PlaneCache`); lists are worked in per request, at a cost that grows with the list.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trieton.compiled import cached_njit
from trieton.constraint.expressions import ConstraintError, Expression, check_names, combined, parse
from trieton.constraint.plane import Plane
from trieton.constraint.plane_cache import CacheStats, PlaneCache, TextCache
from trieton.index.catalog import encode_item_ids
from trieton.index.static_index import StaticIndex

__all__ = ["CacheStats", "ConstraintError", "compile_constraint", "plane_cache", "precompile"]

# A plane of few allowed items is a list of edges per level: of at most so many items, and only where such a list, at so
# many bits an edge, is not larger than the bits it stands for.
SMALL_SET = 1024
LISTED_EDGE_BITS = 64

SEARCH_BLOCK = 256  # binary searches that go on at the same time
_ONES = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)  # set bits of each byte

ItemIds = Sequence[int] | Sequence[str] | np.ndarray

_caches: "weakref.WeakKeyDictionary[StaticIndex, tuple[PlaneCache, TextCache]]" = weakref.WeakKeyDictionary()
_caches_lock = threading.Lock()


def compile_constraint(
    index: StaticIndex,
    expression: str | None = None,
    include: ItemIds | None = None,
    exclude: ItemIds | None = None,
    *,
    base: str | None = None,
) -> Plane:
    """The plane of one request; exact, and cached by the normalised expression.

    Args:
        expression: e.g. `fresh and (region_us or region_ca) and not adult`; None allows every item.
        include: ids of the only items allowed, further reduced by `expression` and `exclude`. None for no such list; an
            empty list allows nothing. Ids that the version does not have are ignored and counted in
            `Plane.num_unknown`: they never stand for another item, and a list of nothing else allows nothing.
        exclude: ids of items not allowed. Ids that the version does not have are ignored.
        base: an expression that holds besides `expression`, such as what a version may answer at all.

    Lists may be in any order and hold an id more than once.

    Raises:
        ConstraintError: a fault in the expression (with its position) or a list of the wrong kind of ids.
    """
    found = None if include is None else find_items(index, include, "include")
    unwanted = None if exclude is None else find_items(index, exclude, "exclude").positions
    plane = constrain(index, expression, None if found is None else found.positions, unwanted, base=base)
    return plane if found is None else replace(plane, num_unknown=len(found.unknown))


@dataclass(frozen=True, eq=False)
class FoundItems:
    """What a list of item ids names.

    Attributes:
        positions: int64, sorted, distinct.
        unknown: distinct ids that the version does not have, as the catalogue encodes ids (int64 or bytes).
    """

    positions: np.ndarray
    unknown: np.ndarray


def find_items(index: StaticIndex, item_ids: ItemIds, what: str) -> FoundItems:
    """Look up a list in any order that may hold an id more than once; `what` begins the text of an error.

    Raises:
        ConstraintError: ids of the wrong kind.
    """
    try:
        # Sorted look-ups walk through memory in one direction: quicker on a large catalogue.
        ids = np.unique(encode_item_ids(item_ids, text=index.catalog.is_text))
        found = index.catalog.positions(ids)
    except (ValueError, TypeError) as error:
        raise ConstraintError(f"{what}: {error}") from None
    return FoundItems(np.unique(found[found >= 0]), ids[found < 0])


def constrain(
    index: StaticIndex,
    expression: str | None = None,
    wanted: np.ndarray | None = None,
    unwanted: np.ndarray | None = None,
    *,
    base: str | None = None,
) -> Plane:
    """`compile_constraint` for lists that have been looked up: `wanted` and `unwanted` are `FoundItems.positions`."""
    plane = _expression_plane(index, [text for text in (base, expression) if text is not None])
    if wanted is not None:
        return _list_plane(index, _without(wanted[plane.allows(wanted)], unwanted))
    if unwanted is None or not len(unwanted):
        return plane
    if plane.included is not None:
        return _list_plane(index, _without(plane.included, unwanted))
    return _excluding(index, plane, unwanted[plane.allows(unwanted)])


def precompile(index: StaticIndex, expressions: Iterable[str] = ()) -> None:
    """Compile `expressions` into the cache of `index`, and everything else that a first request would wait for.

    Raises:
        ConstraintError: the first expression that cannot be compiled.
    """
    for expression in expressions:
        _expression_plane(index, [expression])
    some = index.catalog.item_ids[:1]
    compile_constraint(index, include=some, exclude=some)
    compile_constraint(index, exclude=some)


def plane_cache(index: StaticIndex) -> PlaneCache:
    """The cache of planes that belongs to `index`; it goes when the index goes."""
    return _caches_of(index)[0]


def _caches_of(index: StaticIndex) -> tuple[PlaneCache, TextCache]:
    with _caches_lock:
        caches = _caches.get(index)
        if caches is None:
            caches = _caches[index] = PlaneCache(), TextCache()
        return caches


# ---- expressions


def _expression_plane(index: StaticIndex, texts: Sequence[str]) -> Plane:
    """The plane of the items that every one of `texts` allows."""
    if not texts:
        return Plane(bits=(None,) * _num_plane_levels(index), index=weakref.ref(index))
    for text in texts:
        if not isinstance(text, str):
            raise ConstraintError(f"expected the expression as text, got {type(text).__name__}")
    planes, canonical = _caches_of(index)
    key, expression = tuple(texts), None
    known = canonical.get(key)
    if known is None:
        expression = _parsed(index, key)
        known = expression.text
        canonical.put(key, known)  # only what was accepted: a caller's mistakes take no memory
    return planes.get(known, lambda: _plane_of(index, expression or _parsed(index, key)))


def _parsed(index: StaticIndex, texts: Sequence[str]) -> Expression:
    """The expression that all `texts` hold. Raises ConstraintError, also for sets that the version does not have."""
    parts = [parse(text) for text in texts]
    for text, part in zip(texts, parts, strict=True):
        check_names(text, part, index.sets)
    # Joined after parsing, so that an error's position is the one in its own text and limits hold for each.
    return combined("and", parts)


def _plane_of(index: StaticIndex, expression: Expression) -> Plane:
    item_bits = expression.evaluate(index.sets, index.num_items)
    allowed = _count_bits(item_bits, 0, index.num_items)
    if allowed == index.num_items:
        return Plane(bits=(None,) * _num_plane_levels(index), index=weakref.ref(index))
    if allowed <= SMALL_SET and allowed * LISTED_EDGE_BITS * _num_plane_levels(index) <= index.num_leaves:
        return _list_plane(index, np.flatnonzero(np.unpackbits(item_bits, count=index.num_items, bitorder="little")))
    leaf_ptr = index.catalog.leaf_ptr
    bits = [item_bits if leaf_ptr is None else _lift(item_bits, leaf_ptr)]
    for ptr in reversed(_child_ptr(index)):
        bits.append(_lift(bits[-1], ptr))
    return Plane(bits=tuple(reversed(bits)), item_bits=item_bits, index=weakref.ref(index))


# ---- lists


def _without(positions: np.ndarray, unwanted: np.ndarray | None) -> np.ndarray:
    return positions if unwanted is None else np.setdiff1d(positions, unwanted, assume_unique=True)


def _list_plane(index: StaticIndex, positions: np.ndarray) -> Plane:
    """The plane that allows exactly `positions` (int64, sorted, distinct)."""
    leaf_ptr = index.catalog.leaf_ptr
    alive = [positions if leaf_ptr is None else _parents(positions, leaf_ptr)]
    for ptr in reversed(_child_ptr(index)):
        alive.append(_parents(alive[-1], ptr))
    return Plane(bits=(None,) * len(alive), alive=tuple(reversed(alive)), included=positions, index=weakref.ref(index))


def _excluding(index: StaticIndex, base: Plane, positions: np.ndarray) -> Plane:
    """`base` less the items at `positions` (int64, sorted, distinct, all allowed by `base`).

    An edge dies when all its living children die; only parents of something dead are looked at.
    """
    leaf_ptr = index.catalog.leaf_ptr
    dead = [positions if leaf_ptr is None else _dead_parents(positions, leaf_ptr, _or_empty(base.item_bits))]
    for ptr, bits in zip(reversed(_child_ptr(index)), reversed(base.bits[1:]), strict=True):
        dead.append(_dead_parents(dead[-1], ptr, _or_empty(bits)))
    return Plane(
        bits=base.bits,
        dead=tuple(reversed(dead)),
        item_bits=base.item_bits,
        excluded=positions,
        index=weakref.ref(index),
    )


def _or_empty(bits: np.ndarray | None) -> np.ndarray:
    return np.zeros(0, np.uint8) if bits is None else bits


# ---- plane levels


def _num_plane_levels(index: StaticIndex) -> int:
    return index.head_levels + (index.head_levels < index.num_levels)


def _child_ptr(index: StaticIndex) -> tuple[np.ndarray, ...]:
    """For every plane level but the last: edge e has the children ptr[e] .. ptr[e + 1] on the plane level below."""
    return index.row_ptr[1 : _num_plane_levels(index)]


@cached_njit(nogil=True)
def _any_bit(bits, lo, hi):
    """Whether any of the bits lo .. hi is set."""
    if lo >= hi:
        return False
    first, last = lo >> 3, (hi - 1) >> 3
    head = np.uint8(0xFF << (lo & 7))
    tail = np.uint8(0xFF >> (7 - ((hi - 1) & 7)))
    if first == last:
        return (bits[first] & head & tail) != 0
    if bits[first] & head or bits[last] & tail:
        return True
    for byte in range(first + 1, last):  # noqa: SIM110  (numba compiles no generator expressions)
        if bits[byte]:
            return True
    return False


@cached_njit(nogil=True)
def _count_bits(bits, lo, hi):
    """How many of the bits lo .. hi are set."""
    if lo >= hi:
        return 0
    first, last = lo >> 3, (hi - 1) >> 3
    head = np.uint8(0xFF << (lo & 7))
    tail = np.uint8(0xFF >> (7 - ((hi - 1) & 7)))
    if first == last:
        return int(_ONES[bits[first] & head & tail])
    count = int(_ONES[bits[first] & head]) + int(_ONES[bits[last] & tail])
    for byte in range(first + 1, last):
        count += int(_ONES[bits[byte]])
    return count


@cached_njit(nogil=True)
def _lift(bits, ptr):
    """Bits of the level above: bit e is set when any of the bits ptr[e] .. ptr[e + 1] is."""
    edges = len(ptr) - 1
    out = np.zeros((edges + 7) // 8, np.uint8)
    lo = np.int64(ptr[0])
    for byte in range(len(out)):
        packed = 0
        for edge in range(byte * 8, min(edges, byte * 8 + 8)):
            hi = np.int64(ptr[edge + 1])
            if _any_bit(bits, lo, hi):
                packed |= 1 << (edge & 7)
            lo = hi
        out[byte] = packed
    return out


@cached_njit(nogil=True)
def _owners(children, ptr):
    """The parent of each child: the edge e with ptr[e] <= child < ptr[e + 1].

    A block of binary searches goes forward in step: their reads wait for memory together instead of one after another.
    """
    out = np.zeros(len(children), np.int64)
    for start in range(0, len(children), SEARCH_BLOCK):
        stop = min(start + SEARCH_BLOCK, len(children))
        size = len(ptr) - 1
        while size > 1:
            half = size >> 1
            for i in range(start, stop):
                if ptr[out[i] + half] <= children[i]:
                    out[i] += half
            size -= half
    return out


@cached_njit(nogil=True)
def _parents(children, ptr):
    """Distinct parents, sorted, of sorted children."""
    out = _owners(children, ptr)
    count = 0
    for edge in out:
        if count == 0 or out[count - 1] != edge:
            out[count] = edge
            count += 1
    return out[:count].copy()


@cached_njit(nogil=True)
def _dead_parents(dead, ptr, bits):
    """Parents, sorted, whose living children (set bits; all where `bits` is empty) are all among the sorted `dead`."""
    out = _owners(dead, ptr)
    count, place = 0, 0
    while place < len(dead):
        edge, first = out[place], place
        while place < len(dead) and out[place] == edge:
            place += 1
        lo, hi = np.int64(ptr[edge]), np.int64(ptr[edge + 1])
        living = hi - lo if len(bits) == 0 else _count_bits(bits, lo, hi)
        if living == place - first:
            out[count] = edge
            count += 1
    return out[:count].copy()
