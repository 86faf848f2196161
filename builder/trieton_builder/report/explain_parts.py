"""Which part of a constraint takes an item away: its expressions split at `and`, its lists."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from trieton.constraint.compile import ItemIds
from trieton.constraint.expressions import parse
from trieton.index.static_index import StaticIndex
from trieton.search.searcher import Query, Searcher


@dataclass(frozen=True)
class Part:
    """One condition of a constraint.

    Attributes:
        label: its text, or "include list", "exclude list".
        allowed: items that it allows, whatever the others say.
        alone: items that it alone takes away: all others allow them.
    """

    label: str
    allowed: int
    alone: int


@dataclass(frozen=True)
class PartItems:
    """A part, and the items it allows: bool [num_items]."""

    part: Part
    items: np.ndarray


def constraint_parts(searcher: Searcher, query: Query) -> list[PartItems]:
    """All conditions that hold for a query; none where everything is allowed."""
    index = searcher.index
    masks: dict[str, np.ndarray] = {}
    for text, note in ((searcher.bundle.manifest.get("base_constraint"), " (base constraint)"), (query.constraint, "")):
        if text is None:
            continue
        whole = parse(text)
        for operand in whole.operands if whole.operator == "and" else (whole,):
            bits = operand.evaluate(index.sets, index.num_items)
            masks[operand.text + note] = np.unpackbits(bits, count=index.num_items, bitorder="little").astype(np.bool_)
    if query.include is not None:
        masks["include list"] = _listed(index, query.include)
    if query.exclude is not None:
        masks["exclude list"] = ~_listed(index, query.exclude)
    failing = sum((~mask).astype(np.int32) for mask in masks.values())
    return [
        PartItems(Part(label, int(mask.sum()), int((~mask & (failing == 1)).sum())), mask)
        for label, mask in masks.items()
    ]


class Reasons:
    """Says of a prefix why the constraint allows no item below it."""

    def __init__(self, index: StaticIndex, parts: Sequence[PartItems]):
        self._parts = parts
        self._below = [np.concatenate([[0], np.cumsum(part.items)]) for part in parts]
        self._leaf_ptr = index.catalog.leaf_ptr
        codes = index.leaf_codes(np.arange(index.num_leaves)).astype(np.int64)
        self._codes = np.where(codes < 0, np.iinfo(np.int64).max, codes)  # what has ended sorts behind all codes

    def of(self, prefix: tuple[int, ...]) -> str:
        """The parts that allow nothing below; where no part does so alone, those that do together."""
        lo, hi = 0, len(self._codes)
        for level, code in enumerate(prefix):
            column = self._codes[lo:hi, level]
            wanted = code if code >= 0 else np.iinfo(np.int64).max
            lo, hi = lo + int(np.searchsorted(column, wanted)), lo + int(np.searchsorted(column, wanted, "right"))
        if self._leaf_ptr is not None:
            lo, hi = int(self._leaf_ptr[lo]), int(self._leaf_ptr[hi])
        kept = [int(below[hi] - below[lo]) for below in self._below]
        nothing = [part.part.label for part, items in zip(self._parts, kept, strict=True) if not items]
        if nothing:
            return ", ".join(nothing)
        some = [part.part.label for part, items in zip(self._parts, kept, strict=True) if items < hi - lo]
        return "only together: " + ", ".join(some)


def _listed(index: StaticIndex, ids: ItemIds) -> np.ndarray:
    found = index.catalog.positions(ids)
    mask = np.zeros(index.num_items, np.bool_)
    mask[found[found >= 0]] = True
    return mask
