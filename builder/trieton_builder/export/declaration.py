"""The declaration that goes with a checkpoint: which token stands for each code, and how a history becomes a prompt."""

import json
from dataclasses import replace
from pathlib import Path

from trieton.retriever import PromptTemplate, TokenMap

DEFAULT_ITEMS = 20


def read_declaration(path: str | Path, *, max_items: int | None = None) -> PromptTemplate:
    """Read a token map and, where it is there, a prompt template from a JSON file.

    The file holds either the token map alone, a list with one object per level, or an object with the keys of
    `retriever.json`: `token_map`, and where wanted `end_token` and `prompt`. So an exported retriever's own
    `retriever.json` can be used again.

    Args:
        max_items: newest items that a prompt keeps; overrides the file, which overrides 20.

    Raises:
        ValueError: names the file and the level or field that does not fit.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    try:
        declared = json.loads(text)
        fields = {"token_map": declared} if isinstance(declared, list) else declared
        if not isinstance(fields, dict) or "token_map" not in fields:
            raise ValueError("expected a list with one object per level, or an object with `token_map`")
        token_map = TokenMap.from_json(fields["token_map"], fields.get("end_token"))
        prompt = PromptTemplate.from_json(fields.get("prompt") or {"max_items": max_items or DEFAULT_ITEMS}, token_map)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return prompt if max_items is None else replace(prompt, max_items=max_items)
