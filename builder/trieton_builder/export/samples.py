"""The exported graphs against the PyTorch model on a user's own prompts, and the template against those prompts."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from trieton.retriever.session import Retriever, RetrieverSpec

from trieton_builder.export.parity import arrays, reference

WIDTH = 10  # of the lists that are compared
BATCH = 8  # prompts of different lengths that the graphs read together
FIELDS = ("history", "input_ids")


@dataclass(frozen=True)
class Agreement:
    """How the graphs agree with the model.

    Attributes:
        prompts: how many were compared.
        largest_difference: of any log-probability, as `trieton_builder.export.parity` counts it.
        worst: the number of the prompt where that is, from 0.
        equal_lists: prompts for which a beam search of width 10 over all codes gives the same list, in order.
        unchecked: prompts given as `input_ids` alone, for which nothing says what the template would make.
    """

    prompts: int
    largest_difference: float
    worst: int
    equal_lists: int
    unchecked: int


@dataclass(frozen=True)
class Samples:
    """Prompts int64 [S] each, the lines where they stand, and how many of them have no history."""

    prompts: list[np.ndarray]
    lines: list[int]
    unchecked: int


def read_samples(path: str | Path, spec: RetrieverSpec) -> Samples:
    """Read one prompt per line of a JSON Lines file.

    A line is `{"history": [[3, 1, 4], [1, 5, 9]]}`, semantic IDs from the oldest item to the newest, or
    `{"input_ids": [...]}`, the tokens of a whole prompt. With both, the template has to make these tokens of that
    history.

    Raises:
        ValueError: names file and line.
    """
    path = Path(path)
    prompts, lines, unchecked = [], [], 0
    for number, text in _lines(path):
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict) or not fields or set(fields) - set(FIELDS):
                raise ValueError(f"expected an object with {' or '.join(FIELDS)}, got {text.strip()[:120]}")
            prompts.append(_prompt(fields, spec))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        unchecked += "history" not in fields
        lines.append(number)
    if not prompts:
        raise ValueError(f"{path}: expected at least one line, got none")
    return Samples(prompts, lines, unchecked)


def compare(model: nn.Module, retriever: Retriever, samples: Samples) -> Agreement:
    """Run all prompts through both; the model reads each alone and without a cache, the graphs read them in batches."""
    worst, place, equal = -1.0, 0, 0
    for start in range(0, len(samples.prompts), BATCH):
        batch = samples.prompts[start : start + BATCH]
        lists, differences = _search(model, retriever, batch)
        for b, prompt in enumerate(batch):
            equal += np.array_equal(lists[b], _reference_list(model, retriever.spec, prompt))
            if not differences[b] <= worst:  # a NaN is the worst
                worst, place = differences[b], start + b
                if np.isnan(worst):
                    return Agreement(len(samples.prompts), worst, place, equal, samples.unchecked)
    return Agreement(len(samples.prompts), worst, place, equal, samples.unchecked)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected JSON Lines in UTF-8, uncompressed ({error})") from None


def _prompt(fields: dict[str, Any], spec: RetrieverSpec) -> np.ndarray:
    given = _given(fields["input_ids"]) if "input_ids" in fields else None
    if "history" not in fields:
        return spec.check_prompt(given, "input_ids")  # type: ignore[arg-type]  # a line has one of them
    made = spec.prompt.tokens(_semantic_ids(fields["history"], spec))
    if given is not None and not np.array_equal(made, given):
        same = min(len(made), len(given))
        differ = np.flatnonzero(made[:same] != given[:same])
        place = int(differ[0]) if len(differ) else same
        raise ValueError(
            f"the template makes another prompt of this history than input_ids, from place {place} on: "
            f"it makes {_around(made, place)}, expected {_around(given, place)}; correct prefix, separator, suffix, "
            "max_items or the token map"
        )
    return spec.check_prompt(made, "history")


def _given(tokens: Any) -> np.ndarray:
    if not isinstance(tokens, list) or not all(type(token) is int and abs(token) < 1 << 63 for token in tokens):
        raise ValueError(f"input_ids: expected a list of tokens, got {json.dumps(tokens)[:120]}")
    return np.array(tokens, np.int64)


def _around(tokens: np.ndarray, place: int) -> str:
    shown = tokens[place : place + 8].tolist()
    return f"{shown} ({len(tokens)} tokens in all)"


def _semantic_ids(history: Any, spec: RetrieverSpec) -> np.ndarray:
    """Codes int64 [n, L], -1 behind the end of a short semantic ID."""
    levels = spec.num_levels
    if not isinstance(history, list) or not all(isinstance(item, list) for item in history):
        raise ValueError(
            f"history: expected semantic IDs, a list of {levels} codes for each item, got {json.dumps(history)[:120]}; "
            "an export knows no item ids"
        )
    codes = np.full((len(history), levels), -1, np.int64)
    for number, item in enumerate(history):
        shortest = levels if spec.end_token is None else 1
        if not shortest <= len(item) <= levels or not all(type(code) is int and 0 <= code < 1 << 31 for code in item):
            raise ValueError(
                f"history: item {number}: expected {levels} codes of 0 or more, got {json.dumps(item)[:120]}"
            )
        codes[number, : len(item)] = item
    return codes


def _search(model: nn.Module, retriever: Retriever, prompts: list[np.ndarray]) -> tuple[np.ndarray, list[float]]:
    """The graphs' beam search over all codes: lists [B, M, L], and the largest difference along each prompt's beams."""
    spec, session = retriever.spec, retriever.start(prompts)
    count = len(prompts)
    paths, scores = np.zeros((count, 1, 0), np.int64), np.zeros((count, 1), np.float64)
    codes = parents = None
    worst = [0.0] * count
    for level in range(spec.num_levels):
        logits, log_z = arrays(session(level, codes, parents))
        found = logits - log_z[..., None]
        for b, prompt in enumerate(prompts):
            wanted, scale = reference(model, spec, level, prompt, _tokens(spec, paths[b]))
            worst[b] = float(np.maximum(worst[b], (np.abs(found[b] - wanted) / scale).max()))
        chosen = [_best(scores[b], found[b, :, : spec.token_map.sizes[level]]) for b in range(count)]
        parents, codes, scores = (np.stack(part) for part in zip(*chosen, strict=True))
        paths = np.concatenate([np.take_along_axis(paths, parents[..., None], 1), codes[..., None]], axis=2)
    return paths, worst


def _reference_list(model: nn.Module, spec: RetrieverSpec, prompt: np.ndarray) -> np.ndarray:
    """The same search by the model alone: codes [M, L]."""
    paths, scores = np.zeros((1, 0), np.int64), np.zeros(1, np.float64)
    for level in range(spec.num_levels):
        wanted, _ = reference(model, spec, level, prompt, _tokens(spec, paths))
        parents, codes, scores = _best(scores, wanted[:, : spec.token_map.sizes[level]])
        paths = np.concatenate([paths[parents], codes[:, None]], axis=1)
    return paths


def _tokens(spec: RetrieverSpec, paths: np.ndarray) -> np.ndarray:
    """Tokens int64 [M, t] of codes [M, t]."""
    columns = [spec.token_map.tokens(level, paths[:, level]) for level in range(paths.shape[1])]
    return np.stack(columns, axis=1) if columns else paths


def _best(scores: np.ndarray, found: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parents, codes and scores [M'] of the best continuations: scores [M], log-probabilities [M, W]."""
    total = (scores[:, None] + found).ravel()
    order = np.argsort(-total, kind="stable")[:WIDTH]  # ties by parent, then by code
    return order // found.shape[1], order % found.shape[1], total[order]
