"""The whole search of one bundle, in process: history -> prompt -> constrained beam search -> items.

`trieton.serving` turns requests into queries and answers into tensors; all that decides an answer is here, so the
same call in a test, a benchmark or an offline job gives what the server gives.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trieton.bundle import Bundle
from trieton.constraint.compile import precompile
from trieton.constraint.expressions import named
from trieton.constraint.plane import Plane
from trieton.search.beam import BeamResult, beam_search
from trieton.search.groups import groups
from trieton.search.prepare import Prepared, Preparer
from trieton.search.query import Answer, Limits, Query, QueryError
from trieton.search.trace import Trace
from trieton.search.watch import CANCELLED, AllCancelledError, Watch

if TYPE_CHECKING:
    from trieton.search.captured import CapturedSearch

__all__ = ["STAGES", "Answer", "Limits", "Query", "QueryError", "Searcher", "Totals"]

STAGES = ("prompt", "constraint", "prefill", "decode", "step", "map")
# Logits of one decode. The graph needs several times as much beside them, and the engine keeps what it once had.
DECODE_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


@dataclass
class Totals:
    """What a searcher has done since it was made.

    Attributes:
        ranked: candidates that the kernel had to rank; 0 from one that does not count.
        seconds: by stage; of a captured search, one launch from prefill to the last step, all is "decode".
    """

    searches: int = 0
    invalid: int = 0
    cancelled: int = 0
    failed: int = 0
    ranked: int = 0
    batches: int = 0
    levels: int = 0
    results: int = 0
    short: int = 0
    certified: int = 0
    unknown_items: int = 0
    unknown_listed: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))


class Searcher:
    """Answers queries from one bundle. Not thread-safe: one per thread, over a shared bundle.

    Args:
        bundle: an opened bundle.
        threads: threads of one operator of the retriever; None takes one. The step has one, always: it is a few
            hundredths of a search, and on shared cores the wait for a second was twenty times the step (seen).
        kernel: kernel of the constrained step, see `beam_search`.
        limits: bounds of a query.
    """

    def __init__(
        self, bundle: Bundle, *, threads: int | None = None, kernel: str = "auto", limits: Limits | None = None
    ):
        self.bundle = bundle
        self.index = bundle.index
        self.retriever = bundle.load_retriever(threads=threads)
        self.kernel = kernel
        self.limits = limits or Limits()
        self.totals = Totals()
        self._captured = self._captured_search()
        base = bundle.manifest.get("base_constraint")
        self._preparer = Preparer(self.index, self.retriever.spec, self.limits, base)
        precompile(self.index, [*bundle.manifest.get("expressions", ()), *([base] if base else [])])
        if not self.index.catalog.is_text and self.index.catalog.positions([-1])[0] >= 0:
            raise ValueError("catalogue: item id -1 cannot be served, it marks padding; give that item another id")

    # ---- what others call

    def search(
        self, queries: Sequence[Query], *, cancelled: Callable[[int], bool] | None = None
    ) -> list[Answer | QueryError]:
        """Answer a batch of queries that may differ in everything.

        Args:
            cancelled: asked between levels with the place of a query: whether nobody waits for it any more.

        Returns:
            One entry per query. A bad query gets a QueryError and changes nothing for the others.
        """
        entries: list[Answer | QueryError | None] = [None] * len(queries)
        accepted: list[Prepared] = []
        for place, query in enumerate(queries):
            try:
                prepared = self.prepare(query, place)
            except QueryError as error:
                self.totals.invalid += 1
                entries[place] = error
            else:
                accepted.append(prepared)
        for group in groups(accepted, self._most_beams()):
            self._search_group(group, cancelled, entries)
        return entries  # type: ignore[return-value]  # every place is filled by now

    def warm_up(self, max_batch_size: int = 1) -> None:
        """Search once with every batch and beam bucket, so that no request pays for first-time compilation."""
        index, limits = self.index, self.limits
        if not index.num_items:
            return
        # A model that is still loading may not ask another one (engine bls): here the rest of a search is warmed, and
        # by the canary requests of a publish the way to the other models.
        search = self._search_zeros if self.retriever.spec.engine == "bls" else self.search
        ids = index.catalog.ids(np.arange(min(index.num_items, 3, limits.max_list_items)))
        some_set = next(iter(index.sets), None)
        expression = None if some_set is None else named(some_set).text
        widths = sorted({min(limits.default_beam_width, limits.max_beam_width), limits.max_beam_width})
        batches = {1, max_batch_size} | {2**n for n in range(max_batch_size.bit_length())}
        for width in widths:
            # A larger batch is searched in parts of this size.
            largest = min(max_batch_size, max(1, self._most_beams() // width))
            asked = {min(batch, largest) for batch in batches if width == widths[0] or batch in (1, max_batch_size)}
            for batch in sorted(asked):
                count = min(width, limits.max_num_results)
                plain = Query(ids[:1], num_results=count, beam_width=width)
                lists = Query(ids, num_results=count, beam_width=width, include=ids, exclude=ids[:1])
                masked = Query(ids, num_results=count, beam_width=width, constraint=expression, exclude=ids[:1])
                for entry in search(([masked, lists, plain] * batch)[:batch]):
                    if isinstance(entry, QueryError):
                        raise entry.__cause__ or entry
        self.totals = Totals()

    def _most_beams(self) -> int:
        """Beams, of all requests together, that are decoded at once."""
        spec = self.retriever.spec
        whole = spec.normalise == "vocabulary" or spec.engine == "optimum"  # whose graphs know no other rows
        columns = spec.vocab_size if whole else max(map(len, self.retriever.columns))
        device = "cuda" if self.index.device.startswith("cuda") else "cpu"
        return max(1, (self.limits.decode_bytes or DECODE_BYTES[device]) // (4 * columns))

    def _search_zeros(self, queries: Sequence[Query]) -> list[Answer | QueryError]:
        """What a search does beside the retriever, which stands still."""
        group = [self.prepare(query, place) for place, query in enumerate(queries)]
        widths = np.array([query.beam_width for query in group], np.int32)

        def logits(level: int, codes: Any, _: Any) -> tuple[np.ndarray, np.ndarray]:
            beams = (len(group), codes.shape[1] if level else 1)
            return np.zeros((*beams, self.index.width(level)), np.float32), np.zeros(beams, np.float32)

        result = beam_search(
            logits,
            self.index,
            batch_size=len(group),
            beam_width=widths,
            constraints=[query.plane for query in group],
            kernel=self.kernel,
            normalise=[query.normalise for query in group],
        )
        return [self._answer(query, result, row) for row, query in enumerate(group)]

    # ---- before the search

    def prepare(self, query: Query, place: int = 0) -> Prepared:
        """Check one query and compile what it asks; `place` is its place in a batch. Raises QueryError."""
        traces = () if query.trace is None else (query.trace,)
        return self._preparer.prepare(query, place, partial(self._spend, traces))

    # ---- the search

    def _search_group(
        self,
        group: list[Prepared],
        cancelled: Callable[[int], bool] | None,
        entries: list[Answer | QueryError | None],
    ) -> None:
        traces = [query.trace for query in group if query.trace is not None]
        for trace in traces:
            trace.attributes |= {"batch_size": len(group), "beam_width": max(query.beam_width for query in group)}
        try:
            result = self._beam_search(group, cancelled, partial(self._spend, traces))
        except AllCancelledError:
            for query in group:
                self._cancel(query, entries)
            return
        except Exception as error:
            # One query that the checks above let through must not take the others down with it. Behind an error that
            # stays with the device no search can succeed.
            if len(group) > 1 and not _stays(error):
                for query in group:
                    self._search_group([query], cancelled, entries)
                return
            self.totals.failed += len(group)
            for query in group:
                failure = QueryError("the search failed", "failed")
                failure.__cause__ = error
                entries[query.place] = failure
            return
        started = time.perf_counter()
        for row, query in enumerate(group):
            problem = result.errors[row]
            if problem is CANCELLED:
                self._cancel(query, entries)
            elif problem is not None:
                self.totals.failed += 1
                entries[query.place] = QueryError(f"the retriever's scores are unusable: {problem}", "failed")
            else:
                entries[query.place] = self._answer(query, result, row)
        self._spend(traces, "map", started)

    def _cancel(self, query: Prepared, entries: list[Answer | QueryError | None]) -> None:
        self.totals.cancelled += 1
        entries[query.place] = QueryError(CANCELLED, "cancelled")

    def _spend(self, traces: Sequence[Trace], stage: str, started: float, **attributes: Any) -> float:
        """Count the time since `started` to a stage and tell those who follow it; returns the time now."""
        now = time.perf_counter()
        self.totals.seconds[stage] += now - started
        for trace in traces:
            trace.stage(stage, started, now, attributes)
        return now

    def _captured_search(self) -> "CapturedSearch | None":
        """On an accelerator the torch engine searches in one launch."""
        on_gpu = self.index.device.startswith("cuda") and self.kernel in ("auto", "gpu")
        if self.retriever.spec.engine != "torch" or not on_gpu:
            return None
        from trieton.search.captured import CapturedSearch  # imports torch and OpenAI Triton

        return CapturedSearch(self.retriever, self.index)

    def _beam_search(
        self, group: list[Prepared], cancelled: Callable[[int], bool] | None, spend: Callable[..., float]
    ) -> BeamResult:
        totals, levels = self.totals, self.index.num_levels
        planes = [query.plane for query in group]
        widths = np.array([query.beam_width for query in group], np.int32)
        normalise = [query.normalise for query in group]
        totals.batches += 1
        started = time.perf_counter()
        if self._captured is not None:  # one launch: between its levels nobody can look at the clock, or leave
            result = self._captured.search([query.prompt for query in group], widths, planes, normalise)
            totals.levels += len(group) * levels
            spend("decode", started)
            return result
        session = self.retriever.start([query.prompt for query in group])
        spend("prefill", started)
        watch = Watch(session, [query.place for query in group], cancelled, spend, started)
        try:
            result = beam_search(
                watch,
                self.index,
                batch_size=len(group),
                beam_width=widths,
                constraints=None if planes.count(None) == len(planes) else planes,
                kernel=self.kernel,
                normalise=normalise,
            )
            return watch.finish(result)
        finally:
            totals.levels += watch.levels

    # ---- after the search

    def _answer(self, query: Prepared, result: BeamResult, row: int) -> Answer:
        catalog, wanted = self.index.catalog, query.num_results
        count = int(result.num_valid[row])
        if catalog.leaf_ptr is None:  # one item per leaf: the plane has already decided
            count = min(count, wanted)
            places = np.arange(count)
            positions = result.leaves[row, :count].copy()
        else:
            places, positions = self._expand(result.leaves[row, :count], query.plane, wanted)
            count = len(positions)
        scores = result.scores[row][places]
        bound = float(result.bound[row])
        # Proven: nothing that was pruned could have beaten the last item, or nothing was pruned at all.
        certified = bound == -np.inf or (count == wanted and bound <= float(scores[-1]))
        totals = self.totals
        totals.searches += 1
        if result.ranked is not None:
            totals.ranked += int(result.ranked[row])
            if query.trace is not None:
                query.trace.attributes["ranked"] = int(result.ranked[row])
        totals.results += count
        totals.short += count < wanted
        totals.certified += certified
        totals.unknown_items += query.num_unknown
        totals.unknown_listed += query.num_unknown_listed
        return Answer(
            positions=positions,
            item_ids=catalog.ids(positions),
            scores=scores,
            codes=result.codes[row][places],
            certified=certified,
            num_unknown=query.num_unknown,
            num_unknown_listed=query.num_unknown_listed,
            num_wanted=wanted,
        )

    def _expand(self, leaves: np.ndarray, plane: Plane | None, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `wanted` allowed items of leaves that may hold several: places among the leaves, and positions."""
        ptr = self.index.catalog.leaf_ptr
        assert ptr is not None
        first, sizes = ptr[leaves].astype(np.int64), (ptr[leaves + 1] - ptr[leaves]).astype(np.int64)
        places = np.repeat(np.arange(len(leaves)), sizes)
        positions = np.arange(len(places)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + first[places]
        if plane is not None:
            allowed = plane.allows(positions)
            places, positions = places[allowed], positions[allowed]
        return places[:wanted], positions[:wanted]


def _stays(error: BaseException) -> bool:
    """Whether every later search of this process will fail, too: a CUDA error that only a new process ends."""
    text = str(error)
    return "CUDA" in text and "out of memory" not in text and not isinstance(error, ValueError)
