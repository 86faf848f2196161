"""The item table of a version: item id <-> position <-> leaf.

Positions number the items in leaf order (items that share a leaf keep the order in which the caller gave them), so
the items of a leaf are one slice and a search result needs no look-up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trieton.compiled import cached_njit

MAX_ID_BYTES = 255
FIND_BLOCK = 256  # searches that go on at the same time


@dataclass(frozen=True)
class Catalog:
    """Items of a version in leaf order.

    Attributes:
        item_ids: int64 [num_items], or fixed-width UTF-8 bytes `S{w}` [num_items], in leaf order.
        order: integer [num_items], positions in ascending order of item id.
        leaf_ptr: integer [num_leaves + 1], first position of each leaf; None when every leaf has one item.
    """

    item_ids: np.ndarray
    order: np.ndarray
    leaf_ptr: np.ndarray | None = field(default=None)

    @property
    def num_items(self) -> int:
        return len(self.item_ids)

    @property
    def is_text(self) -> bool:
        """Whether item ids are strings (else int64)."""
        return self.item_ids.dtype.kind == "S"

    def positions(self, item_ids: Sequence[int] | Sequence[str] | np.ndarray) -> np.ndarray:
        """Positions int64 of `item_ids`, -1 where the catalogue has no such item.

        Raises:
            ValueError: ids of the wrong kind (text for an integer catalogue, or the reverse).
        """
        wanted = encode_item_ids(item_ids, text=self.is_text)
        if not self.num_items:
            return np.full(len(wanted), -1, np.int64)
        if not self.is_text:
            return _find(self.item_ids, self.order, wanted)
        width = self.item_ids.itemsize
        fits = np.char.str_len(wanted) <= width
        rows = np.ascontiguousarray(self.item_ids).view(np.uint8).reshape(-1, width)
        # Text has a compare of its own; both kinds are searched through `order`, so that server instances share the
        # mapped file and hold no sorted copy of their own.
        found = _find_text(rows, self.order, wanted.astype(f"S{width}").view(np.uint8).reshape(-1, width))
        return np.where(fits, found, -1)

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Item ids at `positions`: int64, or an object array of `str`."""
        ids = self.item_ids[positions]
        return np.array([i.decode() for i in ids.tolist()], object) if self.is_text else ids

    def leaves(self, positions: np.ndarray) -> np.ndarray:
        """Leaf int64 of each position."""
        if self.leaf_ptr is None:
            return np.asarray(positions, np.int64)
        return span_of(self.leaf_ptr, positions)

    def validate(self, num_leaves: int) -> None:
        """Check shapes and offsets. Raises ValueError."""
        if self.item_ids.ndim != 1 or self.item_ids.dtype.kind not in "iS":
            raise ValueError(f"item ids: expected a flat array of int64 or bytes, got {self.item_ids.dtype}")
        if self.order.shape != self.item_ids.shape or self.order.dtype.kind != "i":
            raise ValueError(f"item order: expected {self.num_items} positions, got {self.order.shape}")
        if self.num_items and not (int(self.order.min()) >= 0 and int(self.order.max()) < self.num_items):
            raise ValueError(f"item order: expected positions below {self.num_items}")
        if self.leaf_ptr is not None:
            check_offsets(self.leaf_ptr, num_leaves, self.num_items, "items of leaf")
        elif self.num_items != num_leaves:
            raise ValueError(f"catalog: expected {num_leaves} items, one per leaf, got {self.num_items}")

    def span(self, leaf: int) -> tuple[int, int]:
        """First and last + 1 position of the items of `leaf`."""
        if self.leaf_ptr is None:
            return leaf, leaf + 1
        return int(self.leaf_ptr[leaf]), int(self.leaf_ptr[leaf + 1])


def check_offsets(offsets: np.ndarray, count: int, total: int, what: str, *, allow_empty: bool = False) -> None:
    """Refuse offsets that do not cut 0..total into `count` pieces of at least one each. Raises ValueError."""
    if offsets.dtype.kind != "i" or offsets.shape != (count + 1,) or int(offsets[0]) != 0 or int(offsets[-1]) != total:
        raise ValueError(f"{what}: expected {count + 1} offsets from 0 to {total}, got {offsets.dtype} {offsets.shape}")
    falls = offsets[1:] < offsets[:-1] if allow_empty else offsets[1:] <= offsets[:-1]
    if falls.any():
        raise ValueError(f"{what} {int(np.argmax(falls))} is empty")


def span_of(pointers: np.ndarray, members: np.ndarray) -> np.ndarray:
    """The state int64 whose span `pointers[state] .. pointers[state + 1]` holds each of `members`."""
    # The needles take the type of the haystack: numpy would otherwise copy the whole haystack at every call.
    members = np.asarray(members).astype(pointers.dtype)
    return (np.searchsorted(pointers, members, side="right") - 1).astype(np.int64)


@cached_njit(nogil=True)
def _find(item_ids, order, wanted):
    """Positions of `wanted` by binary search over `item_ids[order]` (not empty), -1 where absent.

    A block of searches goes forward in step: their reads wait for memory together instead of one after another.
    """
    found = np.full(len(wanted), -1, np.int64)
    low = np.empty(FIND_BLOCK, np.int64)
    for start in range(0, len(wanted), FIND_BLOCK):
        block = wanted[start : start + FIND_BLOCK]
        low[:] = 0
        size = len(order)
        while size > 1:
            half = size >> 1
            for i in range(len(block)):
                if item_ids[order[low[i] + half]] <= block[i]:
                    low[i] += half
            size -= half
        for i in range(len(block)):
            if item_ids[order[low[i]]] == block[i]:
                found[start + i] = order[low[i]]
    return found


@cached_njit(nogil=True)
def _find_text(item_ids, order, wanted):
    """`_find` for ids as rows of bytes, uint8 [N, width] and [n, width]."""
    found = np.full(len(wanted), -1, np.int64)
    low = np.empty(FIND_BLOCK, np.int64)
    for start in range(0, len(wanted), FIND_BLOCK):
        count = min(FIND_BLOCK, len(wanted) - start)
        low[:] = 0
        size = len(order)
        while size > 1:
            half = size >> 1
            for i in range(count):
                if _compare(item_ids[order[low[i] + half]], wanted[start + i]) <= 0:
                    low[i] += half
            size -= half
        for i in range(count):
            if _compare(item_ids[order[low[i]]], wanted[start + i]) == 0:
                found[start + i] = order[low[i]]
    return found


@cached_njit(nogil=True)
def _compare(a, b):
    """Below, at or above 0 as the bytes `a` sort before, with or behind `b`."""
    for i in range(a.size):
        if a[i] != b[i]:
            return np.int64(a[i]) - np.int64(b[i])
    return 0


def encode_item_ids(item_ids: Sequence[int] | Sequence[str] | np.ndarray, *, text: bool) -> np.ndarray:
    """Item ids in the form in which they are stored: int64, or UTF-8 `S{w}`. Refuses the wrong kind."""
    if text and not isinstance(item_ids, np.ndarray):
        array = np.array([*item_ids, None], object)[:-1]  # numpy would turn ["a", 2] into two strings
    else:
        array = np.asarray(item_ids)
    if array.ndim != 1:
        raise ValueError(f"item ids: expected a flat list, got shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, "S1" if text else np.int64)
    if not text:
        if array.dtype.kind not in "iu" or (array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max):
            raise ValueError(
                f"item ids: expected integers of at most 64 bits, got {array.dtype} ({array.flat[0]!r}, ...)"
            )
        return array.astype(np.int64)
    if array.dtype.kind not in "USO":
        raise ValueError(f"item ids: expected strings, got {array.dtype} ({array.flat[0]!r}, ...)")
    if array.dtype.kind == "S" and array.itemsize <= MAX_ID_BYTES and _all_filled(array):
        return array
    encoded = []
    for row, value in enumerate(array.tolist()):
        if not isinstance(value, str | bytes):
            raise ValueError(f"item ids: row {row}: expected a string, got {type(value).__name__} {value!r}")
        raw = value.encode() if isinstance(value, str) else value
        if not raw or len(raw) > MAX_ID_BYTES or b"\0" in raw:
            raise ValueError(
                f"item ids: row {row}: expected 1 to {MAX_ID_BYTES} bytes of UTF-8 without NUL, "
                f"got {len(raw)} bytes: {raw[:40]!r}"
            )
        encoded.append(raw)
    return np.array(encoded, f"S{max(map(len, encoded))}")


def _all_filled(array: np.ndarray) -> bool:
    """Whether no byte string is empty or has a NUL inside."""
    sizes = np.char.str_len(array)
    filled = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1) != 0
    return bool(sizes.all() and (filled.sum(1) == sizes).all())
