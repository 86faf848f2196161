"""Named sets of a version, e.g. fresh or region_us. Each is stored as a bitmap or a list, whichever is smaller."""

import json
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from trieton.index.tensorfile import MAX_HEADER

MAX_SETS = 100_000  # of one version: more are a column of titles or ids, taken for names by mistake
MAX_NAME_BYTES = 1024  # UTF-8 bytes of a name
_ENTRY_BYTES = 96  # of a set in a file's header, besides its name
_OTHER_HEADER_BYTES = 1 << 20  # what the header holds besides the sets


def name_fault(name: str) -> str | None:
    """What is wrong with the name of a set, e.g. "expected ..., got ..."; None where it is fine."""
    if not name.strip():
        return f"the name of a set is missing or empty, got {name!r}"
    size = len(name.encode(errors="surrogatepass"))
    if size > MAX_NAME_BYTES:
        return f"expected a set name of at most {MAX_NAME_BYTES} bytes, got {size:,} ({name[:40]!r}...)"
    if name != name.strip():
        return f"expected a set name without space at its ends, got {name!r}"
    if not name.isprintable() and any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name):
        return f"expected a set name without control characters, got {name!r}"
    return None


def check_set_names(names: Collection[str]) -> None:
    """Refuse names of sets that one version cannot have, or cannot have together.

    Raises:
        ValueError: too many names, a faulty one, two that look the same on any screen, or more text than a file takes.
    """
    if len(names) > MAX_SETS:
        raise ValueError(f"expected at most {MAX_SETS:,} named sets, got {len(names):,}; are these titles or ids?")
    header = _OTHER_HEADER_BYTES
    composed: dict[str, str] = {}
    for name in names:
        if fault := name_fault(name):
            raise ValueError(f"set {name[:40]!r}: {fault}")
        header += _ENTRY_BYTES + len(json.dumps(name))
        other = composed.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            raise ValueError(
                f"sets {other!a} and {name!a} look the same and differ in their Unicode form; "
                "write both in one form, such as NFC"
            )
    if header > MAX_HEADER:
        raise ValueError(
            f"the names of {len(names):,} sets take {header:,} bytes in a file's header, which holds {MAX_HEADER:,}; "
            "expected fewer or shorter names"
        )


def differ_in_case(names: Collection[str]) -> list[list[str]]:
    """Groups of names that differ in upper and lower case only; requests tell them apart."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(name.casefold(), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


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
