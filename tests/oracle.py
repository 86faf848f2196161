"""The one oracle: what Trieton must return, by enumeration in plain Python. Slow and obvious on purpose."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

Codes = tuple[int, ...]
NextLogits = Callable[[Codes], np.ndarray]  # prefix -> float32 logits of the next level


def log_probs(logits: np.ndarray, log_z: float | None = None) -> np.ndarray:
    """float32 log-probabilities as every kernel defines them: the normaliser is summed in float64, then rounded once.

    Rounding once makes the order of the sum invisible, so kernels can agree bit for bit; the clamp keeps that rounding
    from turning a log-probability positive.
    """
    logits = np.asarray(logits, np.float32)
    if log_z is None:
        wide = logits.astype(np.float64)
        top = wide.max()
        log_z = top + np.log(np.exp(wide - top).sum()) if np.isfinite(top) else top
    with np.errstate(invalid="ignore"):
        return np.where(logits == -np.inf, np.float32(-np.inf), np.minimum(logits - np.float32(log_z), np.float32(0)))


class Rules:
    """What a search is held to.

    Args:
        allowed: the semantic IDs that may be found, all of one length: behind the end of a short one its end codes.
        ends: per level the end code, -1 where there is none; none at all when left out.
        normalise: "vocabulary", "level" or "allowed"; `columns` are the codes of each level, for "level".
    """

    def __init__(
        self,
        allowed: Collection[Codes],
        ends: Sequence[int] = (),
        normalise: str = "vocabulary",
        columns: Sequence[int] = (),
    ):
        self.num_levels = len(next(iter(allowed))) if allowed else 0
        self.ends = tuple(ends) or (-1,) * self.num_levels
        self.normalise, self.columns = normalise, columns
        self.children: dict[Codes, set[int]] = {}
        for codes in allowed:
            for level in range(len(codes)):
                self.children.setdefault(codes[:level], set()).add(codes[level])

    def steps(self, next_logits: NextLogits, prefix: Codes) -> list[tuple[int, np.float32]]:
        """(code, log p) of every allowed child of a prefix that has not ended, by code."""
        logits, codes = next_logits(prefix), sorted(self.children[prefix])
        if self.normalise == "level":
            logits = logits[: self.columns[len(prefix)]]
        if self.normalise == "allowed":
            return list(zip(codes, log_probs(logits[codes]), strict=True))
        return [(code, log_probs(logits)[code]) for code in codes]

    def whole(self, prefix: Codes) -> bool:
        """Whether nothing can follow: the last code is an end code, or the last there is."""
        return len(prefix) == self.num_levels or (bool(prefix) and prefix[-1] == self.ends[len(prefix) - 1])

    def filled(self, codes: Codes) -> Codes:
        return (*codes, *self.ends[len(codes) :])

    def score(self, next_logits: NextLogits, codes: Codes) -> np.float32:
        """Score of one semantic ID, added level by level as a search adds it."""
        total, prefix = np.float32(0), ()
        while not self.whole(prefix):
            step = dict(self.steps(next_logits, prefix))
            prefix = codes[: len(prefix) + 1]
            total = np.float32(total + step[prefix[-1]])
        return total


def beam_search(
    next_logits: NextLogits, allowed: Collection[Codes], width: int, **rules: Any
) -> tuple[list[tuple[Codes, np.float32]], float]:
    """True beam search over the allowed semantic IDs: ([(codes, score)], highest score that found no room).

    Of all children of all beams those that end go to a list of the best `width` that have ended; of the others, where
    they can still come into that list, the best `width` by (score descending, parent, code) are the next beams.
    """
    held = Rules(allowed, **rules)
    live: list[tuple[Codes, np.float32]] = [((), np.float32(0))] if allowed else []
    ended: list[tuple[Codes, np.float32]] = []
    bound = -np.inf
    for _ in range(held.num_levels):
        candidates = []
        for prefix, score in live:
            for code, step in held.steps(next_logits, prefix):
                total = np.float32(score + step)
                if total > -np.inf:
                    candidates.append(((*prefix, code), total))
        candidates.sort(key=lambda c: -c[1])  # sorting keeps the order of parent and code among equals
        ended = sorted([*ended, *(c for c in candidates if held.whole(c[0]))], key=lambda c: -c[1])[:width]
        least = ended[-1][1] if len(ended) == width else -np.inf
        going_on = [c for c in candidates if not held.whole(c[0]) and c[1] > least]
        if len(going_on) > width:
            bound = max(bound, float(going_on[width][1]))
        live = going_on[:width]
    return [(held.filled(codes), score) for codes, score in ended], bound


def top(
    next_logits: NextLogits, allowed: Collection[Codes], count: int, **rules: Any
) -> list[tuple[Codes, np.float32]]:
    """The true best `count` of all allowed semantic IDs, without any beam."""
    held = Rules(allowed, **rules)
    scored = [(codes, held.score(next_logits, codes)) for codes in allowed]
    scored = [s for s in scored if s[1] > -np.inf]
    return sorted(scored, key=lambda s: (-s[1], s[0]))[:count]


class ToyModel:
    """Deterministic logits that depend on the whole prefix, for any codebook sizes."""

    def __init__(self, sizes: Collection[int], seed: int = 0, spread: float = 2.0):
        self.sizes = tuple(sizes)
        self.seed = seed
        self.spread = spread

    def __call__(self, prefix: Codes) -> np.ndarray:
        rng = np.random.default_rng([self.seed, len(prefix), *prefix])
        return (rng.standard_normal(self.sizes[len(prefix)]) * self.spread).astype(np.float32)
