"""Sort keys: a row's codes packed into a few integers that sort as the codes do.

Any engine can sort integers; none of them needs to know what a semantic ID is. Levels are packed from the most
significant bits down, as many levels per key as fit into 63 bits (the sign bit stays clear, so engines with and
without unsigned types agree).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from trieton.compiled import cached_njit

KEY_BITS = 63
MAX_CODEBOOK = np.iinfo(np.int32).max - 1  # codes travel as int32, and the end code stands behind the last one


@dataclass(frozen=True)
class KeyLayout:
    """Where each level's code lies in the keys.

    Every level but the first reserves the end code `sizes[level]`, so that the layout does not depend on whether some
    semantic ID is short.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, codebook_sizes: Sequence[int]) -> "KeyLayout":
        """The layout for codebooks of these sizes.

        Raises:
            ValueError: no levels, or a size that is not a positive 31-bit number.
        """
        sizes = tuple(codebook_sizes)
        for level, size in enumerate(sizes):
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 1 <= size <= MAX_CODEBOOK:
                raise ValueError(f"codebook_sizes: level {level}: expected 1 to {MAX_CODEBOOK}, got {size!r}")
        if not sizes:
            raise ValueError("codebook_sizes: expected one number per level, got none")
        return cls(tuple(int(size) for size in sizes))

    @property
    def num_levels(self) -> int:
        return len(self.sizes)

    @property
    def num_keys(self) -> int:
        return int(self.places[0, -1]) + 1

    @cached_property
    def places(self) -> np.ndarray:
        """int64 [3, num_levels]: the key that holds a level, its shift there, its mask after the shift."""
        places = np.zeros((3, self.num_levels), np.int64)
        key, used = 0, 0
        for level, size in enumerate(self.sizes):
            bits = max(1, int(size if level else size - 1).bit_length())
            if used + bits > KEY_BITS:
                key, used = key + 1, 0
            used += bits
            places[:, level] = key, used, (1 << bits) - 1
        for key in range(int(places[0, -1]) + 1):
            inside = places[0] == key
            places[1, inside] = places[1, inside].max() - places[1, inside]
        return places

    def pack(self, codes: np.ndarray, lengths: np.ndarray | None = None) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Pack codes [N, num_levels] of any integer type.

        Args:
            lengths: integers [N], 1 to num_levels; behind the length of a row stands the end code, whatever was given.

        Returns:
            Keys int64 [num_keys, N]; and how many codes do not fit their codebook, with row and level of the first of
            them (-1 where all fit). The keys mean nothing unless all fit.
        """
        keys = np.empty((self.num_keys, len(codes)), np.int64)
        # uint64 beyond int64 turns negative here, and a negative code never fits.
        wide = np.ascontiguousarray(codes, np.int64)
        ends = np.zeros(0, np.int64) if lengths is None else np.ascontiguousarray(lengths, np.int64)
        return keys, _pack(wide, ends, np.array(self.sizes), self.places, keys)

    def unpack(self, keys: np.ndarray) -> np.ndarray:
        """The reverse of `pack`: codes int64 [N, num_levels]."""
        key, shift, mask = self.places
        return np.ascontiguousarray(((keys[key] >> shift[:, None]) & mask[:, None]).T)


@cached_njit(nogil=True)
def _pack(codes, lengths, sizes, places, keys):
    bad, bad_row, bad_level = 0, -1, -1
    keys[:] = 0
    for row in range(codes.shape[0]):
        length = lengths[row] if len(lengths) else codes.shape[1]
        for level in range(codes.shape[1]):
            code = codes[row, level] if level < length else sizes[level]
            if level < length and (code < 0 or code >= sizes[level]):
                if bad == 0:
                    bad_row, bad_level = row, level
                bad += 1
            keys[places[0, level], row] |= code << places[1, level]
    return bad, bad_row, bad_level
