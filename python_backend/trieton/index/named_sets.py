"""Named sets of a version, e.g. fresh or region_us. Each is stored as a bitmap or a list, whichever is smaller."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np


def positions_type(num_items: int) -> np.dtype:
    """dtype in which positions of members are stored."""
    return np.dtype(np.int32 if num_items <= np.iinfo(np.int32).max else np.int64)


def stored_as_bits(members: int, num_items: int) -> bool:
    """Whether a set of that size is smaller as one bit per item than as a list of its members' positions."""
    return (num_items + 7) // 8 <= members * positions_type(num_items).itemsize


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
            if stored_as_bits(len(members), num_items):
                stored[name] = np.packbits(masks[name], bitorder="little")
            else:
                stored[name] = members.astype(positions_type(num_items))
        return cls(num_items, stored)

    def __getitem__(self, name: str) -> np.ndarray:
        held = self.stored[name]
        if held.dtype == np.uint8:
            return held
        mask = np.zeros(self.num_items, np.bool_)
        mask[held] = True
        return np.packbits(mask, bitorder="little")

    def __contains__(self, name: object) -> bool:
        return name in self.stored  # a Mapping's own would unpack the set to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def validate(self, num_items: int) -> None:
        """Check shapes and positions. Raises ValueError."""
        for name, held in self.stored.items():
            if held.dtype == np.uint8:
                if held.shape != ((num_items + 7) // 8,):
                    raise ValueError(f"set {name!r}: expected {(num_items + 7) // 8} bytes, got {held.shape}")
                if num_items % 8 and held[-1] >> num_items % 8:
                    raise ValueError(f"set {name!r}: has members beyond the {num_items} items")
            elif held.dtype.kind != "i" or held.ndim != 1:
                raise ValueError(f"set {name!r}: expected bits or positions, got {held.dtype} {held.shape}")
            elif held.size and not (held[0] >= 0 and held[-1] < num_items and (held[1:] > held[:-1]).all()):
                raise ValueError(f"set {name!r}: expected ascending positions below {num_items}")

    def sizes(self) -> dict[str, int]:
        """Members of each set."""
        return {
            name: int(np.unpackbits(held).sum()) if held.dtype == np.uint8 else len(held)
            for name, held in self.stored.items()
        }
