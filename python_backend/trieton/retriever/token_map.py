"""Which token of the model's vocabulary stands for each code of each level."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

LARGEST_TOKEN = (1 << 31) - 1  # a request's tokens are int32


@dataclass(frozen=True)
class TokenMap:
    """Which token stands for each code: `token = token_map[level][code]`.

    Attributes:
        levels: per level the token of every code; a `range` where they are consecutive.
        end_token: the token that ends a semantic ID shorter than the deepest one; None where all have one length.
        shared_tokens: whether a token may stand for codes of several levels, as a tokenizer's words do. Where it may
            not, an overlap is a mistake in counting, and is refused.
    """

    levels: tuple[range | tuple[int, ...], ...]
    end_token: int | None = None
    shared_tokens: bool = False

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError("token map: expected at least one level, got none")
        if self.end_token is not None and not (type(self.end_token) is int and 0 <= self.end_token <= LARGEST_TOKEN):
            raise ValueError(f"token map: expected an end token of 0 or more, got {self.end_token!r}")
        for level, tokens in enumerate(self.levels):
            ends = _ends(tokens)
            if not ends or min(ends) < 0 or max(ends) > LARGEST_TOKEN:
                raise ValueError(
                    f"token map: level {level}: expected at least one token, none negative or above {LARGEST_TOKEN}, "
                    f"got {str(tokens)[:120]}"
                )
            if not isinstance(tokens, range) and len(set(tokens)) != len(tokens):
                raise ValueError(f"token map: level {level}: two codes have the same token")
            if self.end_token is not None and level and self.end_token in tokens:
                raise ValueError(
                    f"token map: level {level}: the end token {self.end_token} is also the token of a code"
                )
        if type(self.shared_tokens) is not bool:
            raise ValueError(f"token map: shared_tokens: expected true or false, got {self.shared_tokens!r}")
        if not self.shared_tokens:
            self._refuse_overlap()

    def _refuse_overlap(self) -> None:
        held = [tokens if isinstance(tokens, range) else frozenset(tokens) for tokens in self.levels]
        for first, second in combinations(range(self.num_levels), 2):
            token = _common(held[first], held[second])
            if token is not None:
                raise ValueError(
                    f"token map: token {token} stands for code {self.levels[first].index(token)} of level {first} and "
                    f"for code {self.levels[second].index(token)} of level {second}; give each level tokens of its "
                    'own, or declare "shared_tokens": true where the model was trained so'
                )

    @classmethod
    def contiguous(cls, sizes: Sequence[int], *, first: int, end_token: int | None = None) -> "TokenMap":
        """Levels one after the other: level 0 at tokens `first ..`, level 1 behind it, and so on."""
        starts = [first + sum(sizes[:level]) for level in range(len(sizes))]
        return cls(tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True)), end_token)

    @property
    def num_levels(self) -> int:
        return len(self.levels)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Codes of each level, the end code not counted."""
        return tuple(map(len, self.levels))

    @cached_property
    def _codes(self) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(tokens, np.int64) for tokens in self.levels)

    @cached_property
    def columns(self) -> tuple[np.ndarray, ...]:
        """Per level the token of each column of the logits, int64: its codes, then the end token (levels >= 1)."""
        if self.end_token is None:
            return self._codes
        return (self._codes[0], *(np.append(tokens, self.end_token) for tokens in self._codes[1:]))

    @property
    def largest(self) -> int:
        """The largest token in use; the vocabulary has to be larger."""
        used = [token for tokens in self.levels for token in _ends(tokens)]
        return int(max(used if self.end_token is None else [*used, self.end_token]))

    def tokens(self, level: int, codes: np.ndarray) -> np.ndarray:
        """Tokens int64 of `codes` (any shape; the end code allowed where there is an end token).

        Raises:
            ValueError: a code outside the level.
        """
        codes = np.asarray(codes)
        columns = self.columns[level]
        if codes.size and (codes.min() < 0 or codes.max() >= len(columns)):
            bad = codes[(codes < 0) | (codes >= len(columns))].flat[0]
            raise ValueError(f"level {level}: expected 0 <= code < {len(columns)}, got {bad}")
        return columns[codes]

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All columns in one array, where each level begins in it, and the number of columns of each level."""
        widths = np.array([len(column) for column in self.columns])
        return np.concatenate(self.columns), np.cumsum(widths) - widths, widths

    def rows(self, codes: np.ndarray) -> np.ndarray:
        """Tokens int64 [n, L] of whole semantic IDs, codes int [n, L].

        Raises:
            ValueError: a code outside its level.
        """
        table, starts, widths = self._table
        if ((codes < 0) | (codes >= widths)).any():
            for level in range(self.num_levels):
                self.tokens(level, codes[:, level])
        return table[codes + starts]

    def to_json(self) -> list[dict[str, Any]]:
        """One object per level: `{"start": s, "size": n}` or `{"tokens": [...]}`."""
        return [
            {"start": tokens.start, "size": len(tokens)} if isinstance(tokens, range) else {"tokens": list(tokens)}
            for tokens in self.levels
        ]

    @classmethod
    def from_json(
        cls, levels: Sequence[Mapping[str, Any]], end_token: int | None = None, *, shared_tokens: bool = False
    ) -> "TokenMap":
        """The reverse of `to_json`.

        Raises:
            ValueError: names the level whose entry is not one of the two forms.
        """
        if not isinstance(levels, list | tuple):
            raise ValueError(f"token map: expected a list with one object per level, got {type(levels).__name__}")
        parsed: list[range | tuple[int, ...]] = []
        for level, entry in enumerate(levels):
            match entry:
                case {"start": start, "size": size} if len(entry) == 2 and type(start) is type(size) is int:
                    parsed.append(range(start, start + size))
                case {"tokens": list(tokens)} if len(entry) == 1 and tokens and all(type(t) is int for t in tokens):
                    parsed.append(tuple(tokens))
                case _:
                    raise ValueError(
                        f'token map: level {level}: expected {{"start": s, "size": n}} or {{"tokens": [...]}}, '
                        f"got {json.dumps(entry)[:120]}"
                    )
        return cls(tuple(parsed), end_token, shared_tokens)


def _ends(tokens: range | tuple[int, ...]) -> Sequence[int]:
    """The tokens of a level, of a range the first and last alone: one of a mistyped size would fill the memory."""
    return (tokens[0], tokens[-1]) if isinstance(tokens, range) and tokens else tuple(tokens)


def _common(some: range | frozenset[int], others: range | frozenset[int]) -> int | None:
    """The smallest token of both levels; ranges are never written out."""
    if isinstance(some, range) and isinstance(others, range):
        first = max(some.start, others.start)
        return first if first < min(some.stop, others.stop) else None
    if isinstance(some, range):
        some, others = others, some
    return min((token for token in some if token in others), default=None)
