"""Named sets of a version, e.g. fresh or region_us. Each is stored as a bitmap or a list, whichever is smaller."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class NamedSets(Mapping[str, np.ndarray]):
    """Maps a name to its items as packed bits, uint8 [ceil(num_items / 8)], little bit order, in leaf order.

    Attributes:
        num_items: items of the version.
        stored: per name either uint8 bits as above or int32/int64 sorted positions of the members.
    """

    num_items: int
    stored: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def from_masks(cls, masks: Mapping[str, np.ndarray], num_items: int) -> "NamedSets":
        """Pack boolean masks [num_items] (leaf order)."""
        stored = {}
        for name in sorted(masks):
            members = np.flatnonzero(masks[name])
            positions = members.astype(np.int32 if num_items <= np.iinfo(np.int32).max else np.int64)
            bits = np.packbits(masks[name], bitorder="little")
            stored[name] = positions if positions.nbytes < bits.nbytes else bits
        return cls(num_items, stored)

    def __getitem__(self, name: str) -> np.ndarray:
        held = self.stored[name]
        if held.dtype == np.uint8:
            return held
        mask = np.zeros(self.num_items, np.bool_)
        mask[held] = True
        return np.packbits(mask, bitorder="little")

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def sizes(self) -> dict[str, int]:
        """Members of each set."""
        return {
            name: int(np.unpackbits(held).sum()) if held.dtype == np.uint8 else len(held)
            for name, held in self.stored.items()
        }
