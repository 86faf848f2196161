"""Why a search gave what it gave: per level the candidates, what the constraint took away, and the beams that stayed.

Runs the readable kernel beside the retriever of a bundle, in this process; no server is involved.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from trieton.search.beam import checked_normalise
from trieton.search.kernels.arrays import as_tensor
from trieton.search.kernels.reference import Search
from trieton.search.searcher import Answer, Query, QueryError, Searcher

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
class LevelTrace:
    """One step of the search.

    Attributes:
        level: 0-based.
        candidates: children of the beams that the trie has.
        allowed: those of them below which the constraint allows an item.
        removed: the best of those it does not allow: (prefix, score), best first.
        missed: how many of those it does not allow would have stayed without the constraint, the beams before being the
            same.
        pruned: the best allowed candidate that found no room: (prefix, score), or None.
        kept: the beams that stayed, best first.
    """

    level: int
    candidates: int
    allowed: int
    removed: list[tuple[Codes, float]]
    missed: int
    pruned: tuple[Codes, float] | None
    kept: list[Beam]


@dataclass(frozen=True)
class Explanation:
    """The whole search of one query.

    Attributes:
        prompt: tokens that the retriever read.
        levels: one trace per level.
        answer: what the served model answers.
        allowed_items: items that the constraint allows, and `num_items` all there are.
    """

    bundle_id: str
    prompt: list[int]
    levels: list[LevelTrace]
    answer: Answer
    beam_width: int
    allowed_items: int
    num_items: int
    constraint: str | None = field(default=None)


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
    search = _Traced(index, np.array([prepared.beam_width], np.int32), [prepared.plane], modes, examples)
    codes = parents = None
    for level in range(index.num_levels):
        logits, log_z = session(level, codes, parents)
        codes, parents = search.step(level, logits, log_z)
        if not search.lives():
            break
    everything = np.arange(index.num_items)
    return Explanation(
        bundle_id=searcher.bundle.bundle_id,
        prompt=prepared.prompt.tolist(),
        levels=search.levels,
        answer=answer,
        beam_width=prepared.beam_width,
        allowed_items=index.num_items if prepared.plane is None else int(prepared.plane.allows(everything).sum()),
        num_items=index.num_items,
        constraint=query.constraint,
    )


class _Traced(Search):
    """The reference kernel for one request, looking at every candidate before it steps."""

    def __init__(self, index: Any, widths: np.ndarray, planes: list, modes: np.ndarray | None, examples: int):
        super().__init__(index, widths, planes, modes)
        self.examples = examples
        self.levels: list[LevelTrace] = []

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
        full = len(kept) >= int(self.widths[0])
        worst = kept[-1].score if full else -np.inf
        self.levels.append(
            LevelTrace(
                level=level,
                candidates=len(everything),
                allowed=len(allowed),
                removed=removed[: self.examples],
                missed=sum(score > worst for _, score in removed),
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


def _best(scored: dict[Codes, float]) -> list[tuple[Codes, float]]:
    return sorted(scored.items(), key=lambda entry: (-entry[1], entry[0]))


# ---- the picture of the HTML page


@dataclass(frozen=True)
class Node:
    """A prefix in the picture."""

    codes: Codes
    score: float
    x: float
    y: float
    parent: int
    best: bool


def picture(explanation: Explanation, *, beams: int = 12, width: int = 1000, row: int = 26) -> dict[str, Any]:
    """The trie around the result as nodes and lines: the first `beams` of every level and whatever leads to an answer.

    Returns:
        nodes per level (`Node`, with `parent` a place among the nodes of the level before), width and height.
    """
    results = {tuple(codes) for codes in explanation.answer.codes.tolist()}
    chosen: list[list[Beam]] = []
    for trace in explanation.levels:
        depth = trace.level + 1
        keep = [b for place, b in enumerate(trace.kept) if place < beams or any(r[:depth] == b.codes for r in results)]
        chosen.append(keep)
    for level in range(len(chosen) - 1, 0, -1):  # every node needs the one that it hangs on
        above = {beam.codes for beam in chosen[level - 1]}
        needed = {beam.codes[:-1] for beam in chosen[level]} - above
        chosen[level - 1] += [beam for beam in explanation.levels[level - 1].kept if beam.codes in needed]
    height = row * (max(map(len, chosen), default=0) + 1)
    step = width / (len(chosen) + 1)
    columns: list[list[Node]] = []
    for level, beams_here in enumerate(chosen):
        above_places = {node.codes: place for place, node in enumerate(columns[-1])} if level else {}
        ordered = sorted(beams_here, key=lambda b: (above_places.get(b.codes[:-1], 0), -b.score))
        gap = height / (len(ordered) + 1)
        columns.append(
            [
                Node(
                    beam.codes,
                    beam.score,
                    x=step * (level + 1),
                    y=gap * (place + 1),
                    parent=above_places.get(beam.codes[:-1], -1),
                    best=any(r[: level + 1] == beam.codes for r in results),
                )
                for place, beam in enumerate(ordered)
            ]
        )
    return {"columns": columns, "width": width, "height": height}


def render_html(explanation: Explanation, history: list) -> str:
    """One page without outside parts: the picture, a table per level, the answer."""
    import jinja2

    loader = jinja2.PackageLoader("trieton_builder.report", "")
    template = jinja2.Environment(loader=loader, autoescape=True).get_template("explain.html.j2")
    answer = explanation.answer
    rows = list(zip(answer.item_ids.tolist(), answer.scores.tolist(), answer.codes.tolist(), strict=True))
    return template.render(e=explanation, history=history, picture=picture(explanation), rows=rows)
