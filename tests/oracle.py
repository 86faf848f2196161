"""The one oracle: what Trieton must return, by enumeration in plain Python. Slow and obvious on purpose."""

from collections.abc import Callable, Collection

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


def beam_search(
    next_logits: NextLogits, allowed: Collection[Codes], width: int
) -> tuple[list[tuple[Codes, np.float32]], float]:
    """True beam search over the allowed semantic IDs (all of one length): ([(codes, score)], highest pruned score).

    The best `width` of ALL children of all beams survive each level, by (score descending, parent, code).
    """
    children: dict[Codes, set[int]] = {}
    for codes in allowed:
        for level in range(len(codes)):
            children.setdefault(codes[:level], set()).add(codes[level])
    num_levels = len(next(iter(allowed))) if allowed else 0
    live: list[tuple[Codes, np.float32]] = [((), np.float32(0))] if allowed else []
    bound = -np.inf
    for level in range(num_levels):
        candidates = []
        for parent, (prefix, score) in enumerate(live):
            step = log_probs(next_logits(prefix))
            for code in sorted(children[prefix]):
                total = np.float32(score + step[code])
                if total > -np.inf:
                    candidates.append((-total, parent, code, (*prefix, code), total))
        candidates.sort(key=lambda c: c[:3])
        if level < num_levels - 1 and len(candidates) > width:
            bound = max(bound, float(candidates[width][4]))
        live = [(c[3], c[4]) for c in candidates[:width]]
    return live, bound


def score_of(next_logits: NextLogits, codes: Codes) -> np.float32:
    """Score of one semantic ID, added level by level as a search adds it."""
    total = np.float32(0)
    for level, code in enumerate(codes):
        total = np.float32(total + log_probs(next_logits(codes[:level]))[code])
    return total


def top(next_logits: NextLogits, allowed: Collection[Codes], count: int) -> list[tuple[Codes, np.float32]]:
    """The true best `count` of all allowed semantic IDs, without any beam."""
    scored = [(codes, score_of(next_logits, codes)) for codes in allowed]
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
