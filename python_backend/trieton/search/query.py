"""What is asked of a search and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trieton.constraint.compile import ItemIds
from trieton.search.trace import Trace


@dataclass(frozen=True)
class Limits:
    """Bounds of one query; the names are those of the model config's parameters.

    A default above its maximum is the maximum.

    Attributes:
        max_list_items: longest history, include or exclude list.
        decode_bytes: float32 logits of one decode, requests * beams * vocabulary * 4. A batch that needs more is
            searched in parts of whole requests; one request alone may exceed it. 0 takes what suits the device,
            `trieton.search.searcher.DECODE_BYTES`.

    Raises:
        ValueError: a bound below 1 (`decode_bytes`: below 0).
    """

    default_num_results: int = 10
    max_num_results: int = 100
    default_beam_width: int = 20
    max_beam_width: int = 256
    max_list_items: int = 10_000
    decode_bytes: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < (name != "decode_bytes"):
                raise ValueError(f"{name}: expected at least {int(name != 'decode_bytes')}, got {value}")

    def of(self, query: "Query") -> tuple[int, int]:
        """(num_results, beam_width) of a query, defaults filled in. Raises QueryError."""
        most = min(self.max_num_results, self.max_beam_width)  # every result needs a beam
        num_results = min(self.default_num_results, most) if query.num_results is None else query.num_results
        _check_bounds("num_results", num_results, 1, most)
        if query.beam_width is None:
            return num_results, max(min(self.default_beam_width, self.max_beam_width), num_results)
        _check_bounds("beam_width", query.beam_width, 1, self.max_beam_width)
        if query.beam_width < num_results:
            raise QueryError(f"beam_width: expected at least num_results = {num_results}, got {query.beam_width}")
        return num_results, query.beam_width


@dataclass(frozen=True)
class Query:
    """What one person asks.

    Attributes:
        history: item ids, oldest first. Ids that the catalogue does not have are skipped and counted; of a history
            longer than the retriever's prompt the newest part counts.
        input_ids: raw prompt tokens instead of a history.
        num_results: items wanted; the default when None.
        beam_width: prefixes that survive each level, at least num_results; when None the default, or num_results if
            that is larger.
        constraint: expression over the version's named sets.
        include: only these items may be returned. An empty list allows nothing.
        exclude: these items are never returned.
        normalise: over what the probabilities of a step add up to 1: the "vocabulary", the codes of the "level" or the
            children that are "allowed", see `trieton.search.beam.beam_search`.
        strict: refuse ids that the catalogue does not have, in the history and in both lists.
        trace: told of each stage; None where nobody follows this query.
    """

    history: ItemIds | None = None
    input_ids: Sequence[int] | np.ndarray | None = None
    num_results: int | None = None
    beam_width: int | None = None
    constraint: str | None = None
    include: ItemIds | None = None
    exclude: ItemIds | None = None
    normalise: str = "vocabulary"
    strict: bool = False
    trace: Trace | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """Items for one query, best first.

    Attributes:
        positions: places of the items in the catalogue, int64 [n], n at most num_results.
        item_ids: int64 [n], or `str` [n] as an object array.
        scores: summed log-probabilities, float32 [n], descending.
        codes: semantic IDs, int32 [n, num_levels]; -1 behind the end of a short one.
        certified: these are the true top of everything the constraint allows, not only of the beam.
        num_unknown: ids of the history that the catalogue does not have.
        num_unknown_listed: distinct ids of the include list, plus those of the exclude list, that it does not have.
        num_wanted: results that were asked for, or the default.
    """

    positions: np.ndarray
    item_ids: np.ndarray
    scores: np.ndarray
    codes: np.ndarray
    certified: bool
    num_unknown: int
    num_unknown_listed: int
    num_wanted: int


class QueryError(ValueError):
    """Why one query has no answer; the text may be shown to whoever asked.

    Attributes:
        kind: "invalid", the query's own fault; "cancelled", nobody waits for it; "failed", ours (see __cause__).
    """

    def __init__(self, text: str, kind: Literal["invalid", "cancelled", "failed"] = "invalid"):
        super().__init__(text)
        self.kind = kind


def _check_bounds(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise QueryError(f"{name}: expected an integer from {low} to {high}, got {value!r}")
    if not low <= value <= high:
        raise QueryError(f"{name}: expected {low} to {high}, got {value}")
