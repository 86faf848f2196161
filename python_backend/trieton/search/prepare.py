"""A query -> what the beam search needs: the prompt's tokens, the compiled constraint, the bounds."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trieton.constraint.compile import ItemIds, constrain, find_items
from trieton.constraint.expressions import ConstraintError
from trieton.constraint.plane import Plane
from trieton.index.static_index import StaticIndex
from trieton.retriever.spec import RetrieverSpec
from trieton.search.kernels import NORMALISE
from trieton.search.query import Limits, Query, QueryError
from trieton.search.trace import Trace

SHOWN_IDS = 5  # unknown ids that a refusal names


@dataclass(frozen=True, eq=False)
class Prepared:
    """A query that has passed every check: prompt tokens int64 [S], its compiled constraint, its bounds."""

    place: int
    prompt: np.ndarray
    plane: Plane | None
    num_results: int
    beam_width: int
    num_unknown: int
    normalise: str = "vocabulary"
    num_unknown_listed: int = 0
    trace: Trace | None = None


class Preparer:
    """Checks queries and prepares them.

    Args:
        base: an expression that every query is held to; None for none.
    """

    def __init__(self, index: StaticIndex, spec: RetrieverSpec, limits: Limits, base: str | None):
        self._index, self._spec, self._limits, self._base = index, spec, limits, base

    def prepare(self, query: Query, place: int, spend: Callable[..., float]) -> Prepared:
        """Check one query and compile what it asks; `place` is its place in a batch, `spend` is told of each stage.

        Raises:
            QueryError: what is wrong with the query.
        """
        num_results, beam_width = self._limits.of(query)
        if query.normalise not in NORMALISE:
            raise QueryError(f"normalise: expected one of {', '.join(NORMALISE)}, got {query.normalise!r}")
        started = time.perf_counter()
        prompt, num_unknown = self._prompt(query)
        prompted = spend("prompt", started, tokens=len(prompt))
        plane, num_unknown_listed = self._plane(query)
        spend("constraint", prompted, expression=query.constraint or "")
        return Prepared(
            place,
            prompt,
            plane,
            num_results,
            beam_width,
            num_unknown,
            normalise=query.normalise,
            num_unknown_listed=num_unknown_listed,
            trace=query.trace,
        )

    def _prompt(self, query: Query) -> tuple[np.ndarray, int]:
        """Prompt tokens int64 [S], and how many ids of the history are unknown."""
        if (query.history is None) == (query.input_ids is None):
            got = "neither" if query.history is None else "both"
            raise QueryError(f"history, input_ids: expected one of them, got {got}")
        if query.input_ids is not None:
            try:
                return self._spec.check_prompt(np.asarray(query.input_ids), "input_ids"), 0
            except ValueError as error:
                raise QueryError(str(error)) from None
        assert query.history is not None
        self._check_list("history", query.history)
        if not len(query.history):
            raise QueryError("history: expected at least one item id, got none")
        try:
            positions = self._index.catalog.positions(query.history)
        except ValueError as error:
            raise QueryError(f"history: {error}") from None
        known = positions[positions >= 0]
        num_unknown = len(positions) - len(known)
        if query.strict:
            _refuse_unknown("history", np.asarray(query.history)[positions < 0], len(positions))
        if not len(known):
            raise QueryError(f"history: none of the {num_unknown} item ids is in the catalogue of this version")
        template = self._spec.prompt
        leaves = self._index.catalog.leaves(known[-template.max_items :])
        return template.tokens(self._index.leaf_codes(leaves)), num_unknown

    def _plane(self, query: Query) -> tuple[Plane | None, int]:
        """The compiled constraint, None when everything is allowed; and how many ids of both lists are unknown."""
        text = query.constraint
        if text is None and query.include is None and query.exclude is None and self._base is None:
            return None, 0
        positions: list[np.ndarray | None] = []
        num_unknown = 0
        try:
            for name, ids in (("include", query.include), ("exclude", query.exclude)):
                if ids is None:
                    positions.append(None)
                    continue
                self._check_list(name, ids)
                found = find_items(self._index, ids, name)
                if query.strict:
                    _refuse_unknown(name, found.unknown, len(ids))
                positions.append(found.positions)
                num_unknown += len(found.unknown)
            return constrain(self._index, text, *positions, base=self._base), num_unknown
        except ConstraintError as error:
            raise QueryError(str(error)) from None

    def _check_list(self, name: str, ids: ItemIds) -> None:
        if len(ids) > self._limits.max_list_items:
            raise QueryError(f"{name}: expected at most {self._limits.max_list_items} item ids, got {len(ids)}")


def _refuse_unknown(name: str, unknown: np.ndarray, count: int) -> None:
    """Raises QueryError that names the first of the unknown ids, where there are any."""
    if not len(unknown):
        return
    texts = [i.decode(errors="replace") if isinstance(i, bytes) else str(i) for i in unknown[:SHOWN_IDS].tolist()]
    shown = ", ".join(repr(t[:60]) if unknown.dtype.kind in "SUO" else t for t in texts)
    more = ", ..." if len(unknown) > SHOWN_IDS else ""
    what = f"{len(unknown)} of {count} item ids are not in the catalogue of this version"
    raise QueryError(f"{name}: {what}: {shown}{more}")
