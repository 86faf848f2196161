"""What a retriever declares about itself: its vocabulary, its token map, how a history becomes a prompt."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

FORMAT_VERSION = 1
SPEC_FILE = "retriever.json"
ENGINES = ("onnx", "torch", "optimum", "bls")
DTYPES = ("float32", "float16", "bfloat16")
LARGEST_TOKEN = (1 << 31) - 1  # a request's tokens are int32
LONGEST_PROMPT = 1 << 20  # tokens; graphs hold tables of that length


@dataclass(frozen=True)
class TokenMap:
    """Which token stands for each code: `token = token_map[level][code]`.

    Attributes:
        levels: per level the token of every code; a `range` where they are consecutive.
        end_token: the token that ends a semantic ID shorter than the deepest one; None where all have one length.
    """

    levels: tuple[range | tuple[int, ...], ...]
    end_token: int | None = None

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
    def from_json(cls, levels: Sequence[Mapping[str, Any]], end_token: int | None = None) -> "TokenMap":
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
        return cls(tuple(parsed), end_token)


def _ends(tokens: range | tuple[int, ...]) -> Sequence[int]:
    """The tokens of a level, of a range the first and last alone: one of a mistyped size would fill the memory."""
    return (tokens[0], tokens[-1]) if isinstance(tokens, range) and tokens else tuple(tokens)


@dataclass(frozen=True)
class PromptTemplate:
    """How a history becomes the tokens of a prompt: prefix, items with separators between them, suffix.

    Attributes:
        token_map: tokens of the items' codes.
        max_items: the newest items that a prompt keeps.
        prefix: tokens before the first item.
        separator: tokens between two items.
        suffix: tokens after the last item.
    """

    token_map: TokenMap
    max_items: int
    prefix: tuple[int, ...] = ()
    separator: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_items < 1:
            raise ValueError(f"prompt template: expected max_items of 1 or more, got {self.max_items}")
        for name in ("prefix", "separator", "suffix"):
            if any(type(token) is not int or token < 0 for token in getattr(self, name)):
                raise ValueError(f"prompt template: {name}: expected tokens of 0 or more, got {getattr(self, name)}")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that the template can make."""
        items = self.max_items * self.token_map.num_levels + (self.max_items - 1) * len(self.separator)
        return len(self.prefix) + items + len(self.suffix)

    def tokens(self, semantic_ids: np.ndarray) -> np.ndarray:
        """Prompt tokens int64 [S] of a history, oldest item first; the newest `max_items` are kept.

        Args:
            semantic_ids: codes int [n, L], -1 behind the end of a short semantic ID.

        Raises:
            ValueError: another number of levels, or a code that its level does not have.
        """
        newest = np.asarray(semantic_ids)[-self.max_items :]
        if newest.ndim != 2 or newest.shape[1] != self.token_map.num_levels:
            raise ValueError(f"history: expected codes [n, {self.token_map.num_levels}], got shape {newest.shape}")
        inside = newest >= 0
        if not inside[:, 0].all():
            raise ValueError(f"history: item {int(np.argmin(inside[:, 0]))} has no semantic ID (code -1 at level 0)")
        tokens = self.token_map.rows(np.maximum(newest, 0))
        if self.separator or not inside.all():
            cells = np.empty((len(newest), newest.shape[1] + len(self.separator)), np.int64)
            cells[:, : newest.shape[1]] = tokens
            cells[:, newest.shape[1] :] = self.separator
            keep = np.ones(cells.shape, np.bool_)
            keep[:, : newest.shape[1]] = inside
            keep[-1:, newest.shape[1] :] = False  # no separator behind the last item
            tokens = cells[keep]
        return np.concatenate([np.array(self.prefix, np.int64), tokens.ravel(), np.array(self.suffix, np.int64)])

    def to_json(self) -> dict[str, Any]:
        return {
            "max_items": self.max_items,
            "prefix": list(self.prefix),
            "separator": list(self.separator),
            "suffix": list(self.suffix),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], token_map: TokenMap) -> "PromptTemplate":
        """The reverse of `to_json`; token lists may be left out."""
        names = ("prefix", "separator", "suffix")
        if (
            not isinstance(fields, Mapping)
            or set(fields) - {"max_items", *names}
            or type(fields.get("max_items")) is not int
            or not all(isinstance(fields.get(name, []), list | tuple) for name in names)
        ):
            raise ValueError(
                "prompt template: expected max_items (integer) and, where wanted, prefix, separator, suffix (lists); "
                f"got {json.dumps(fields)[:120]}"
            )
        return cls(token_map, fields["max_items"], **{name: tuple(fields.get(name, ())) for name in names})


@dataclass(frozen=True)
class RetrieverSpec:
    """A retriever's declaration, stored as `retriever.json` beside its graphs.

    Attributes:
        family: the model family that was exported, e.g. "t5".
        vocab_size: tokens of the model; every token of a prompt and of the token map is below it.
        max_length: prompt tokens at most.
        prompt: how a history becomes a prompt; holds the token map.
        engine: what runs the graphs: "onnx" (ONNX Runtime), "torch" (programs of `torch.export`), "optimum" (graphs
            that Optimum exported, on ONNX Runtime), or "bls" (models of the server that runs the search).
        dtype: of weights and keys/values: "float32", "float16" or "bfloat16".
        normalise: what log-probabilities are normalised over, the whole "vocabulary" or the codes of the "level".
        fingerprint: sha256 over the graphs and everything above.
    """

    family: str
    vocab_size: int
    max_length: int
    prompt: PromptTemplate
    engine: str = "onnx"
    dtype: str = "float32"
    normalise: str = "vocabulary"
    fingerprint: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name, most in (("vocab_size", LARGEST_TOKEN), ("max_length", LONGEST_PROMPT)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name}: expected an integer from 1 to {most}, got {value!r}")
        if self.token_map.largest >= self.vocab_size:
            raise ValueError(
                f"token map: token {self.token_map.largest} lies outside the model's vocabulary of {self.vocab_size}"
            )
        for name in ("prefix", "separator", "suffix"):
            for token in getattr(self.prompt, name):
                if token >= self.vocab_size:
                    raise ValueError(
                        f"prompt template: {name}: token {token} lies outside the vocabulary of {self.vocab_size}"
                    )
        if self.prompt.longest > self.max_length:
            raise ValueError(
                f"prompt template: {self.prompt.max_items} items make up to {self.prompt.longest} tokens, the model "
                f"takes {self.max_length}; lower max_items or export with a larger max_length"
            )
        if self.engine not in ENGINES:
            raise ValueError(f"engine: expected one of {', '.join(ENGINES)}, got {self.engine!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.normalise not in ("vocabulary", "level"):
            raise ValueError(f'normalise: expected "vocabulary" or "level", got {self.normalise!r}')

    @property
    def token_map(self) -> TokenMap:
        return self.prompt.token_map

    @property
    def end_token(self) -> int | None:
        return self.token_map.end_token

    @property
    def num_levels(self) -> int:
        return self.token_map.num_levels

    def check_prompt(self, tokens: np.ndarray, name: str = "prompt") -> np.ndarray:
        """The tokens of one prompt as int64 [S].

        Raises:
            ValueError: begins with `name`; not a flat list of integers, empty, too long, or a token the model lacks.
        """
        tokens = np.asarray(tokens)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ValueError(f"{name}: expected a flat list of integers, got {tokens.dtype} {tokens.shape}")
        if not 1 <= tokens.size <= self.max_length:
            raise ValueError(f"{name}: expected 1 to {self.max_length} tokens, got {tokens.size}")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            place = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0])
            raise ValueError(
                f"{name}: expected tokens 0 <= token < {self.vocab_size}, got {tokens[place]} at place {place}"
            )
        return tokens.astype(np.int64)

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "family": self.family,
            "engine": self.engine,
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
            "normalise": self.normalise,
            "token_map": self.token_map.to_json(),
            "end_token": self.end_token,
            "prompt": self.prompt.to_json(),
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "RetrieverSpec":
        """The reverse of `to_json`.

        Raises:
            ValueError: a newer format version, or a field that is missing or does not fit.
        """
        version = fields.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"retriever: format version {version!r}, this release reads {FORMAT_VERSION}")
        try:
            token_map = TokenMap.from_json(fields["token_map"], fields["end_token"])
            plain = ("family", "engine", "dtype", "vocab_size", "max_length", "normalise", "fingerprint")
            prompt = PromptTemplate.from_json(fields["prompt"], token_map)
            return cls(prompt=prompt, **{name: fields[name] for name in plain})
        except KeyError as error:
            raise ValueError(f"retriever: field {error} is missing") from None

    def save(self, folder: Path, graphs: Sequence[Path]) -> "RetrieverSpec":
        """Write `retriever.json` into `folder` and return the spec with its fingerprint over `graphs`."""
        spec = RetrieverSpec.from_json({**self.to_json(), "fingerprint": self._digest(graphs)})
        (folder / SPEC_FILE).write_text(json.dumps(spec.to_json(), indent=1) + "\n")
        return spec

    def check_files(self, folder: Path) -> None:
        """Compare the fingerprint with spec and graphs in `folder`. Reads every byte of them.

        Raises:
            ValueError: a graph is missing, damaged or another's, or `retriever.json` was edited.
        """
        if self.engine == "bls":
            return  # its graphs are the server's
        files = sorted(path for path in folder.iterdir() if path.name != SPEC_FILE)
        if not all(path.is_file() for path in files) or self._digest(files) != self.fingerprint:
            names = ", ".join(path.name for path in files)
            raise ValueError(
                f"{folder}: {SPEC_FILE} and what lies beside it ({names}) are not what was exported: the fingerprint "
                "differs; export again"
            )

    def _digest(self, graphs: Sequence[Path]) -> str:
        digest = hashlib.sha256(json.dumps({**self.to_json(), "fingerprint": ""}, sort_keys=True).encode())
        for graph in sorted(graphs):
            digest.update(f"{graph.name}:{graph.stat().st_size}:".encode())
            with graph.open("rb") as file:
                while chunk := file.read(1 << 24):
                    digest.update(chunk)
        return digest.hexdigest()

    @classmethod
    def load(cls, folder: str | Path) -> "RetrieverSpec":
        """Read `retriever.json` of `folder`.

        Raises:
            ValueError: no such file, not JSON, or not a spec; names the file.
        """
        path = Path(folder) / SPEC_FILE
        try:
            fields = json.loads(path.read_text())
            if not isinstance(fields, dict):
                raise ValueError(f"expected an object, got {type(fields).__name__}")
            return cls.from_json(fields)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: not a usable retriever ({error})") from None
