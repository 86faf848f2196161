"""The item table of a version: item id <-> position <-> leaf.

Positions number the items in leaf order (items that share a leaf keep the order in which the caller gave them), so
the items of a leaf are one slice and a search result needs no look-up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

MAX_ID_BYTES = 255


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

    @cached_property
    def _sorted_ids(self) -> np.ndarray:
        # One sorted copy makes a look-up a plain binary search; without it every probe is two cache misses.
        return self.item_ids[self.order]

    def positions(self, item_ids: Sequence[int] | Sequence[str] | np.ndarray) -> np.ndarray:
        """Positions int64 of `item_ids`, -1 where the catalogue has no such item.

        Raises:
            ValueError: ids of the wrong kind (text for an integer catalogue, or the reverse).
        """
        wanted = encode_item_ids(item_ids, text=self.is_text)
        if not self.num_items:
            return np.full(len(wanted), -1, np.int64)
        place = np.searchsorted(self._sorted_ids, wanted)
        place[place == self.num_items] = 0
        found = self._sorted_ids[place] == wanted
        return np.where(found, self.order[place], -1).astype(np.int64)

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Item ids at `positions`: int64, or an object array of `str`."""
        ids = self.item_ids[positions]
        return np.array([i.decode() for i in ids.tolist()], object) if self.is_text else ids

    def leaves(self, positions: np.ndarray) -> np.ndarray:
        """Leaf int64 of each position."""
        if self.leaf_ptr is None:
            return np.asarray(positions, np.int64)
        return (np.searchsorted(self.leaf_ptr, positions, side="right") - 1).astype(np.int64)

    def span(self, leaf: int) -> tuple[int, int]:
        """First and last + 1 position of the items of `leaf`."""
        if self.leaf_ptr is None:
            return leaf, leaf + 1
        return int(self.leaf_ptr[leaf]), int(self.leaf_ptr[leaf + 1])


def encode_item_ids(item_ids: Sequence[int] | Sequence[str] | np.ndarray, *, text: bool) -> np.ndarray:
    """Item ids in the form in which they are stored: int64, or UTF-8 `S{w}`. Refuses the wrong kind."""
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
