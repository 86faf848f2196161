"""The declaration that goes with a checkpoint: which token stands for each code, and how a history becomes a prompt."""

import json
from pathlib import Path
from typing import Any

from trieton.retriever.session import PromptTemplate, TokenMap

DEFAULT_ITEMS = 20
OWN = ("token_map", "end_token", "prompt")
OTHERS = ("format_version", "family", "engine", "dtype", "vocab_size", "max_length", "normalise", "fingerprint")


def read_declaration(path: str | Path, *, max_items: int | None = None) -> PromptTemplate:
    """Read a token map and, where it is there, a prompt template from a JSON file.

    The file holds either the token map alone, a list with one object per level, or an object with the keys of
    `retriever.json`: `token_map`, and where wanted `end_token` and `prompt`. So an exported retriever's own
    `retriever.json` can be used again; what else it says belongs to its graphs.

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
        token_map = TokenMap.from_json(fields["token_map"], fields.get("end_token"))
        template = {} if fields.get("prompt") is None else fields["prompt"]
        if isinstance(template, dict):
            template = (
                {"max_items": DEFAULT_ITEMS, **template} if max_items is None else {**template, "max_items": max_items}
            )
        return PromptTemplate.from_json(template, token_map)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a field that stands in it twice, Python would drop the first."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the field {next(name for name in names if names.count(name) > 1)!r} stands in it twice")
    return fields
