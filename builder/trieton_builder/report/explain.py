"""Why a search gave what it gave: per level the candidates, what the constraint took away, and the beams that stayed.

Runs the readable kernel beside the retriever of a bundle, in this process; no server is involved.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from trieton.constraint.compile import find_items
from trieton.search.beam import checked_normalise
from trieton.search.kernels.arrays import as_tensor
from trieton.search.kernels.reference import Search
from trieton.search.searcher import Answer, Query, QueryError, Searcher

from trieton_builder.report.explain_parts import Part, Reasons, constraint_parts

Codes = tuple[int, ...]


@dataclass(frozen=True)
class Beam:
    """A prefix that stayed.

    Attributes:
        codes: the prefix, its own level last.
        score: summed log-probability.
        parent: place among the beams of the level before.
    """

    codes: Codes
    score: float
    parent: int


@dataclass(frozen=True)
class Removed:
    """A prefix that the constraint took away; `by`: the parts of it that did, see `Reasons`."""

    codes: Codes
    score: float
    by: str


@dataclass(frozen=True)
class LevelTrace:
    """One step of the search: `candidates` = `num_removed` + `num_pruned` + the `kept`.

    Attributes:
        level: 0-based.
        candidates: children of the beams that the trie has.
        allowed: those of them below which the constraint allows an item.
        removed: the best of those it does not allow, best first.
        removed_by: how many it does not allow, by the parts of the constraint that took them away.
        missed: how many of those it does not allow would be among the beams without the constraint, the beams before
            being the same; at most the beam width, but for semantic IDs that end here and need no beam.
        pruned: the best allowed candidate that found no room: (prefix, score), or None.
        kept: the beams that stayed, best first.
    """

    level: int
    candidates: int
    allowed: int
    removed: list[Removed]
    removed_by: Mapping[str, int]
    missed: int
    pruned: tuple[Codes, float] | None
    kept: list[Beam]

    @property
    def num_removed(self) -> int:
        """Candidates that the constraint took away."""
        return self.candidates - self.allowed

    @property
    def num_pruned(self) -> int:
        """Allowed candidates that found no room among the beams."""
        return self.allowed - len(self.kept)


@dataclass(frozen=True)
class Explanation:
    """The whole search of one query.

    Attributes:
        prompt: tokens that the retriever read.
        levels: one trace per level.
        answer: what the served model answers.
        allowed_items: items that everything asked allows, and `num_items` all there are.
        constraint: the expression that was asked, `base` the one that the bundle adds.
        include, exclude: the lists of the query.
        num_unknown: ids of the include list that the bundle does not have.
        parts: what the constraint consists of, part by part.
    """

    bundle_id: str
    prompt: list[int]
    levels: list[LevelTrace]
    answer: Answer
    beam_width: int
    allowed_items: int
    num_items: int
    constraint: str | None = field(default=None)
    base: str | None = None
    include: list | None = None
    exclude: list | None = None
    num_unknown: int = 0
    parts: tuple[Part, ...] = ()


def explain(searcher: Searcher, query: Query, *, examples: int = 5) -> Explanation:
    """Search once more, slowly, and keep what was seen on the way.

    Args:
        examples: removed candidates to name per level.

    Raises:
        QueryError: as the search itself.
    """
    (answer,) = searcher.search([query])
    if isinstance(answer, QueryError):
        raise answer
    prepared = searcher.prepare(query)
    index = searcher.index
    session = searcher.retriever.start([prepared.prompt])
    modes = checked_normalise(prepared.normalise, 1)
    search = _Traced(index, np.array([prepared.beam_width], np.int32), [prepared.plane], modes)
    codes = parents = None
    for level in range(index.num_levels):
        logits, log_z = session(level, codes, parents)
        codes, parents = search.step(level, logits, log_z)
        if not search.lives():
            break
    parts = constraint_parts(searcher, query)
    levels = search.levels
    if parts:
        reasons = Reasons(index, parts)
        levels = [
            _with_reasons(trace, found, reasons, examples) for trace, found in zip(levels, search.removed, strict=True)
        ]
    everything = np.arange(index.num_items)
    return Explanation(
        bundle_id=searcher.bundle.bundle_id,
        prompt=prepared.prompt.tolist(),
        levels=levels,
        answer=answer,
        beam_width=prepared.beam_width,
        allowed_items=index.num_items if prepared.plane is None else int(prepared.plane.allows(everything).sum()),
        num_items=index.num_items,
        constraint=query.constraint,
        base=searcher.bundle.manifest.get("base_constraint"),
        include=None if query.include is None else list(query.include),
        exclude=None if query.exclude is None else list(query.exclude),
        num_unknown=0 if query.include is None else len(find_items(index, query.include, "include").unknown),
        parts=tuple(part.part for part in parts),
    )


def _with_reasons(trace: LevelTrace, found: list[tuple[Codes, float]], reasons: Reasons, examples: int) -> LevelTrace:
    told = [Removed(codes, score, reasons.of(codes)) for codes, score in found]
    return replace(trace, removed=told[:examples], removed_by=dict(Counter(one.by for one in told).most_common()))


class _Traced(Search):
    """The reference kernel for one request, looking at every candidate before it steps."""

    def __init__(self, index: Any, widths: np.ndarray, planes: list, modes: np.ndarray | None):
        super().__init__(index, widths, planes, modes)
        self.levels: list[LevelTrace] = []
        self.removed: list[list[tuple[Codes, float]]] = []  # all of them, by level

    def step(self, level: int, logits: Any, log_z: Any | None) -> tuple[torch.Tensor, torch.Tensor]:
        allowed = self._scored(level, logits, log_z)
        planes, self.planes = self.planes, [None]
        everything = self._scored(level, logits, log_z)
        self.planes = planes
        removed = _best({codes: score for codes, score in everything.items() if codes not in allowed})
        codes, parents = super().step(level, logits, log_z)
        live = (self.hi > self.lo)[0].nonzero().flatten().tolist()
        kept = [
            Beam(tuple(self.codes[0, m, : level + 1].tolist()), float(self.score[0, m]), int(parents[0, m]))
            for m in live
        ]
        ended = self.ended.take(self.ended.level == level)  # whole semantic IDs, which need no beam
        kept += [
            Beam(tuple(code[: level + 1]), score, parent)
            for code, score, parent in zip(
                ended.codes.tolist(), ended.score.tolist(), ended.parent.tolist(), strict=True
            )
        ]
        kept.sort(key=lambda beam: -beam.score)
        lost = _best({codes: score for codes, score in allowed.items() if codes not in {beam.codes for beam in kept}})
        self.removed.append(removed)
        self.levels.append(
            LevelTrace(
                level=level,
                candidates=len(everything),
                allowed=len(allowed),
                removed=[],
                removed_by={},
                missed=_missed(everything, allowed, int(self.widths[0])),
                pruned=lost[0] if lost else None,
                kept=kept,
            )
        )
        return codes, parents

    def _scored(self, level: int, logits: Any, log_z: Any | None) -> dict[Codes, float]:
        """Score of every candidate by its prefix."""
        found = self._children(level)
        logits = as_tensor(logits, self.device)
        log_z = None if log_z is None else as_tensor(log_z, self.device)
        score = self._scores(level, logits, log_z, found)
        prefixes = self.codes[0, found.beam, :level].tolist()
        end = self.index.end_code(level)
        return {
            (*prefix, c if c != end else -1): s
            for prefix, c, s in zip(prefixes, found.code.tolist(), score.tolist(), strict=True)
            if s > -np.inf
        }


def _missed(everything: dict[Codes, float], allowed: dict[Codes, float], width: int) -> int:
    """How many candidates would have stayed if the constraint allowed all of them."""
    ranked = [codes for codes, _ in _best(everything)]
    living = [codes for codes in ranked if codes[-1] >= 0][:width]
    ended = [codes for codes in ranked if codes[-1] < 0]
    return sum(codes not in allowed for codes in (*living, *ended))


def _best(scored: dict[Codes, float]) -> list[tuple[Codes, float]]:
    return sorted(scored.items(), key=lambda entry: (-entry[1], entry[0]))
