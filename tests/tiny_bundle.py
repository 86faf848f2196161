"""A whole bundle for tests, and what plain Python knows about it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from oracle import Codes, beam_search, log_probs
from trieton.retriever.session import Retriever
from trieton_builder.bundle.write import write_bundle
from trieton_builder.indexing.trie import build_index

SIZES = (8, 8, 8)
FIRST_ID = 1000


@dataclass(frozen=True)
class Catalogue:
    """Items in the order in which they were given to the builder."""

    ids: list
    codes: list[Codes]
    sets: dict[str, set]

    def allowed(self, constraint: str | None = None, include: list | None = None, exclude: list | None = None) -> list:
        """Ids that a request may be given; the constraint is Python over set names."""
        names = {name: name for name in self.sets}
        keep = []
        for item in self.ids:
            inside = {name: item in self.sets[name] for name in names}
            if constraint is not None and not eval(constraint, {"__builtins__": {}}, inside):
                continue
            if (include is None or item in include) and (exclude is None or item not in exclude):
                keep.append(item)
        return keep


def tiny_catalogue(seed: int = 0, num_items: int = 300, *, text_ids: bool = False) -> Catalogue:
    """The catalogue of a tiny bundle."""
    rng = np.random.default_rng(seed)
    codes = [tuple(int(c) for c in row) for row in rng.integers(0, SIZES, (num_items, len(SIZES)))]
    ids: list = [f"item-{FIRST_ID + i}" if text_ids else FIRST_ID + i for i in range(num_items)]
    rare = set(rng.choice(num_items, -(-num_items // 50), replace=False).tolist())
    sets = {
        "even": {item for i, item in enumerate(ids) if i % 2 == 0},
        "third": {item for i, item in enumerate(ids) if i % 3 == 0},
        "rare": {item for i, item in enumerate(ids) if i in rare},
        "none_at_all": set(),
    }
    return Catalogue(ids, codes, sets)


def write_tiny_bundle(
    out_dir: Path,
    make_retriever: Callable[..., Path],
    *,
    seed: int,
    text_ids: bool,
    num_items: int,
    **options: object,
) -> str:
    """Write the bundle of `tiny_catalogue(seed, num_items)` and return its id."""
    catalogue = tiny_catalogue(seed, num_items, text_ids=text_ids)
    sets = {name: np.array([item in held for item in catalogue.ids], np.bool_) for name, held in catalogue.sets.items()}
    codes = np.array(catalogue.codes).reshape(-1, len(SIZES))
    index = build_index(codes, codebook_sizes=SIZES, item_ids=np.array(catalogue.ids), sets=sets)
    return write_bundle(out_dir, index=index, retriever_dir=make_retriever(SIZES), **options)  # type: ignore[arg-type]


def write_slow_bundle(out_dir: Path, make_retriever: Callable[..., Path], *, num_levels: int = 32) -> str:
    """A bundle of so many levels that a large request takes long enough to be interrupted."""
    sizes = (8,) * num_levels
    codes = np.random.default_rng(0).integers(0, 8, (500, num_levels))
    index = build_index(codes, codebook_sizes=sizes, item_ids=np.arange(FIRST_ID, FIRST_ID + 500))
    return write_bundle(out_dir, index=index, retriever_dir=make_retriever(sizes))


def expected(
    retriever: Retriever, catalogue: Catalogue, prompt: np.ndarray, allowed: list, width: int, count: int
) -> list[tuple[object, float]]:
    """(item id, score) that a search must return, by the oracle's beam search over the allowed items only."""
    by_codes: dict[Codes, list] = {}
    inside = set(allowed)
    for item, codes in zip(catalogue.ids, catalogue.codes, strict=True):
        if item in inside:
            by_codes.setdefault(codes, []).append(item)

    def next_logits(prefix: Codes) -> np.ndarray:
        session = retriever.start([prompt])
        logits, log_z = session(0, None, None)
        for level, code in enumerate(prefix):
            logits, log_z = session(level + 1, np.array([[code]], np.int32), np.zeros((1, 1), np.int32))
        known = log_probs(logits[0, 0], log_z[0, 0]).astype(np.float64)
        # One more column holds what the rest of the vocabulary has, so that the oracle's own normaliser is the model's.
        return np.append(known, np.log(max(1 - np.exp(known).sum(), 1e-300))).astype(np.float32)

    beams, _ = beam_search(next_logits, list(by_codes), width)
    return [(item, float(score)) for codes, score in beams for item in by_codes[codes]][:count]


def assert_same(got: list[tuple[object, float]], want: list[tuple[object, float]], tolerance: float = 1e-4) -> None:
    """Same length and scores; the same items, except where items within the tolerance of each other change places."""
    assert len(got) == len(want), (got, want)
    for (item, score), (_, should) in zip(got, want, strict=True):
        assert abs(score - should) <= tolerance, (got, want)
        near = [other for other, value in want if abs(value - score) <= tolerance]
        # The last place may go to an item just below the cut.
        assert item in near or abs(score - want[-1][1]) <= tolerance, (item, got, want)
    assert len({item for item, _ in got}) == len(got), "an item twice"
