"""The declaration that goes with a checkpoint: which token stands for each code, and how a history becomes a prompt."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trieton.retriever.session import PromptTemplate, TokenMap
from trieton.retriever.spec import Framing

from trieton_builder.export.said import Said

DEFAULT_ITEMS = 20
OWN = ("token_map", "end_token", "shared_tokens", "prompt")
OTHERS = (
    "format_version", "family", "engine", "dtype", "vocab_size", "max_length", "normalise", "checkpoint", "fingerprint",
)  # fmt: skip


@dataclass(frozen=True)
class Declaration:
    """What a user declared.

    Attributes:
        prompt: the template with its token map, empty where nothing was declared.
        origins: where each declared part of the prompt stands, in words.
    """

    prompt: PromptTemplate
    origins: dict[str, str]


@dataclass(frozen=True)
class Contract:
    """How prompts are made: what was declared, and what the checkpoint says where nothing was.

    Attributes:
        prompt: the template.
        checkpoint: what the checkpoint says, whatever was declared.
        origins: for each part of the prompt, in words, where it comes from.
        remarks: what does not fit together.
    """

    prompt: PromptTemplate
    checkpoint: Framing
    origins: dict[str, str]
    remarks: tuple[str, ...]


def read_declaration(path: str | Path, *, max_items: int | None = None) -> Declaration:
    """Read a token map and, where it is there, a prompt template from a JSON file.

    The file holds either the token map alone, a list with one object per level, or an object with the keys of
    `retriever.json`: `token_map`, and where wanted `end_token`, `shared_tokens` and `prompt`. So the `retriever.json`
    of an exported retriever can be used again; what else it says belongs to its graphs.

    Args:
        max_items: newest items that a prompt keeps; overrides the file, which overrides 20.

    Raises:
        ValueError: names the file and the level or field that does not fit.
    """
    path = Path(path)
    try:
        declared = json.loads(path.read_bytes(), object_pairs_hook=_once)
        fields = {"token_map": declared} if isinstance(declared, list) else declared
        if not isinstance(fields, dict) or "token_map" not in fields:
            raise ValueError("expected a list with one object per level, or an object with `token_map`")
        unknown = sorted(set(fields) - {*OWN, *OTHERS})
        if unknown:
            raise ValueError(f"expected {', '.join(OWN)}, got the field {unknown[0]!r}")
        token_map = TokenMap.from_json(
            fields["token_map"], fields.get("end_token"), shared_tokens=fields.get("shared_tokens", False)
        )
        template = {} if fields.get("prompt") is None else fields["prompt"]
        origins = {"max_items": "the default"}
        if isinstance(template, dict):
            origins |= dict.fromkeys(template, f"declared in {path.name}")
            given = {} if max_items is None else {"max_items": max_items}
            origins |= dict.fromkeys(given, "--max-items")
            template = {"max_items": DEFAULT_ITEMS, **template, **given}
        if "end_token" in fields:
            origins["end_token"] = f"declared in {path.name}"
        return Declaration(PromptTemplate.from_json(template, token_map), origins)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def complete(
    declaration: Declaration, said: Said, *, normalise: str = "vocabulary", max_length: int | None = None
) -> Contract:
    """The declared prompt, with prefix, suffix and end token of the checkpoint where none were declared.

    A token that stands for a code is not taken for anything else. Nor is an end token with `normalise` "level": its
    log-probability would become a part of every score.
    """
    prompt, origins, remarks = declaration.prompt, {"separator": "not declared"}, list(said.remarks)
    codes = prompt.token_map.levels
    changes: dict[str, Any] = {}
    kept: dict[str, tuple[int, ...]] = {}
    for name in ("prefix", "suffix"):
        tokens, origins[name] = getattr(said, name), said.origins.get(name, "not declared")
        if any(token in level for token in tokens for level in codes):
            origins[name] += f", {list(tokens)}, is the token of a code: not taken"
            remarks.append(f"{name}: {origins[name]}; declare what the model was trained with")
            tokens = ()
        kept[name] = tokens
        if name not in declaration.origins:
            changes[name] = tokens
    end = said.end_token
    origins["end_token"] = said.origins.get("end_token", "not declared")
    if end is not None and any(end in level for level in codes):
        origins["end_token"] += f", {end}, is the token of a code: not taken"
        end = None
    elif end is not None and normalise == "level":
        origins["end_token"] += f", {end}: taken only where it is declared, because it would change scores by level"
    elif end is not None and "end_token" not in declaration.origins:
        changes["token_map"] = dataclasses.replace(prompt.token_map, end_token=end)
    blocked = sum(token in level for token in said.forbidden for level in codes)
    if blocked:
        remarks.append(f"generation_config.json: forbids {blocked} tokens of codes, whose items are found all the same")
    if said.encoder_decoder:
        origins["start_token"] = said.origins["start_token"]
    prompt = dataclasses.replace(prompt, **changes)
    needed = max(prompt.longest, max_length or 0) + prompt.token_map.num_levels - 1
    if said.positions is not None and needed > said.positions and not said.encoder_decoder:
        remarks.append(
            f"max_items: prompts of {prompt.max_items} items and the answer behind them take up to {needed} positions, "
            f"the model has seen {said.positions} (max_position_embeddings of config.json); lower --max-items"
        )
    framing = Framing(kept["prefix"], kept["suffix"], end, said.start_token)
    return Contract(prompt, framing, {**origins, **declaration.origins}, tuple(remarks))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a field that stands in it twice, Python would drop the first."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in names if names.count(name) > 1)!r} stands in it twice")
    return fields
