"""What a retriever declares about itself: its vocabulary, its token map, how a history becomes a prompt."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trieton.retriever.token_map import LARGEST_TOKEN, TokenMap

__all__ = ["SPEC_FILE", "Framing", "PromptTemplate", "RetrieverSpec", "TokenMap"]

FORMAT_VERSION = 1
SPEC_FILE = "retriever.json"
ENGINES = ("onnx", "torch", "optimum", "bls")
DTYPES = ("float32", "float16", "bfloat16")
LONGEST_PROMPT = 1 << 20  # tokens; graphs hold tables of that length


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
class Framing:
    """What the checkpoint itself says about prompts and answers, beside what the export was told.

    Attributes:
        prefix, suffix: tokens that it puts in front of and behind every text, BOS and EOS.
        end_token: EOS, which ends what it writes.
        start_token: what the decoder of an encoder-decoder starts with.
    """

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    end_token: int | None = None
    start_token: int | None = None

    def to_json(self) -> dict[str, Any]:
        """What is known, nothing where nothing is."""
        lists = {name: list(getattr(self, name)) for name in ("prefix", "suffix") if getattr(self, name)}
        one = {name: getattr(self, name) for name in ("end_token", "start_token") if getattr(self, name) is not None}
        return lists | one

    @classmethod
    def from_json(cls, fields: Any) -> "Framing":
        """The reverse of `to_json`. Raises ValueError."""
        known = {"prefix": list, "suffix": list, "end_token": int, "start_token": int}
        if not isinstance(fields, dict) or any(type(value) is not known.get(name) for name, value in fields.items()):
            raise ValueError(f"checkpoint: expected {', '.join(known)}, got {json.dumps(fields)[:120]}")
        prefix, suffix = (tuple(fields.get(name, ())) for name in ("prefix", "suffix"))
        return cls(prefix, suffix, fields.get("end_token"), fields.get("start_token"))


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
        checkpoint: what the checkpoint says about prompts, whatever was declared.
        fingerprint: sha256 over the graphs and everything above.
    """

    family: str
    vocab_size: int
    max_length: int
    prompt: PromptTemplate
    engine: str = "onnx"
    dtype: str = "float32"
    normalise: str = "vocabulary"
    checkpoint: Framing = Framing()
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

    @property
    def encoder_decoder(self) -> bool:
        """Whether an encoder reads the prompt and a decoder, behind a start token, writes the semantic ID."""
        return self.family == "t5" or self.checkpoint.start_token is not None

    def remarks(self) -> list[str]:
        """Where prompts lack what the checkpoint puts around them: right only if the model was trained without it."""
        found = []
        for name, place in (("prefix", "in front of"), ("suffix", "behind")):
            said, held = getattr(self.checkpoint, name), getattr(self.prompt, name)
            if any(token not in held for token in said):
                found.append(
                    f"{name}: the checkpoint puts {list(said)} {place} a prompt, the template puts {list(held)}; "
                    "a model that was trained with them answers worse without"
                )
        if not self.encoder_decoder and not self.prompt.prefix and not self.checkpoint.prefix:
            found.append(
                "prefix: nothing stands in front of the first item (no BOS): right only where the model was trained so"
            )
        return found

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
        checkpoint = self.checkpoint.to_json()
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
            # Only where they say something: earlier releases wrote neither, and the fingerprint is over all of this.
            **({"shared_tokens": True} if self.token_map.shared_tokens else {}),
            "prompt": self.prompt.to_json(),
            **({"checkpoint": checkpoint} if checkpoint else {}),
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
            token_map = TokenMap.from_json(
                fields["token_map"], fields["end_token"], shared_tokens=fields.get("shared_tokens", False)
            )
            plain = ("family", "engine", "dtype", "vocab_size", "max_length", "normalise", "fingerprint")
            prompt = PromptTemplate.from_json(fields["prompt"], token_map)
            checkpoint = Framing.from_json(fields.get("checkpoint", {}))
            return cls(prompt=prompt, checkpoint=checkpoint, **{name: fields[name] for name in plain})
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
