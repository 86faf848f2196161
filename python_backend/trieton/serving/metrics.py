"""Figures of a running instance, in the server's own metrics endpoint.

Names and labels are bounded: the model's name, and for stages and outcomes a fixed list. Versions and bundles are
values, not labels, because a label that changes with every rollout leaves its old series behind for ever. Instances of
one model add to the same counters.

How long requests wait is the server's to say (nv_inference_queue_duration_us, nv_inference_pending_request_count): the
Python backend is not told when a request arrived.
"""

import ctypes
import threading
from typing import Any

from trieton.constraint.compile import plane_cache
from trieton.search.searcher import STAGES, Searcher

SECONDS = 0.5  # how often figures travel; each one is a message to the server, too dear to send per request

OUTCOMES = ("ok", "invalid", "cancelled", "failed")
COUNTERS = {
    "trieton_searches": ("Queries by how they ended", "outcome"),
    "trieton_batches": ("Calls of the beam search", None),
    "trieton_batched_queries": ("Queries in the batches that the server formed", None),
    "trieton_executions": ("Batches that the server formed", None),
    "trieton_levels": ("Levels searched, summed over queries", None),
    "trieton_candidates": ("Candidates that had to be ranked; kernel gpu does not count", None),
    "trieton_results": ("Items returned", None),
    "trieton_short_results": ("Queries with fewer items than asked for", None),
    "trieton_certified_results": ("Queries whose result is proven to be the true top", None),
    "trieton_unknown_items": ("History items that the catalogue does not have", None),
    "trieton_stage_seconds": ("Time by stage of the search", "stage"),
    "trieton_plane_cache_hits": ("Constraints found compiled", None),
    "trieton_plane_cache_misses": ("Constraints compiled", None),
    "trieton_plane_cache_evictions": ("Compiled constraints dropped for space", None),
    "trieton_compile_seconds": ("Time spent compiling constraints", None),
}
GAUGES = {
    "trieton_plane_cache_bytes": "Size of the compiled constraints held",
    "trieton_index_items": "Items of the version that answers",
    "trieton_index_leaves": "Distinct semantic IDs of the version that answers",
    "trieton_index_bytes": "Size of the trie of the version that answers",
    "trieton_model_version": "Version that answers: the one that answered last, or became ready last",
    "trieton_bundle": "First 12 hex digits of that version's bundle id, as a number",
    "trieton_ready_time_seconds": "Unix time at which that version became ready",
}


class Reporter:
    """Sends what has changed twice a second, from a thread of its own, so that no request waits for it."""

    def __init__(self, pb_utils: Any, searcher: Searcher, *, model: str, version: str, now: float):
        self._searcher = searcher
        self._executions = self._queries = 0
        self._sent: dict[tuple[str, str], float] = {}
        self._metrics: dict[tuple[str, str], Any] = {}
        kinds = pb_utils.MetricFamily
        for name, (text, label) in COUNTERS.items():
            family = kinds(name=name, description=text, kind=kinds.COUNTER)
            _immortal(family)
            for value in {"outcome": OUTCOMES, "stage": STAGES, None: ("",)}[label]:
                labels = {"model": model} | ({label: value} if label else {})
                self._metrics[name, value] = _immortal(family.Metric(labels=labels))
        for name, text in GAUGES.items():
            family = kinds(name=name, description=text, kind=kinds.GAUGE)
            _immortal(family)
            self._metrics[name, ""] = _immortal(family.Metric(labels={"model": model}))
        index = searcher.index
        self._described = {
            "trieton_index_items": index.num_items,
            "trieton_index_leaves": index.num_leaves,
            "trieton_index_bytes": index.nbytes,
            "trieton_model_version": int(version),
            "trieton_bundle": int(searcher.bundle.bundle_id[:12], 16),
            "trieton_ready_time_seconds": now,
        }
        self._describe()
        self._seen = 0  # executions at the last report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trieton-metrics", daemon=True)
        self._thread.start()

    def batch(self, queries: int) -> None:
        """Note one batch of the server."""
        self._executions += 1
        self._queries += queries

    def close(self) -> None:
        """Send what is left and end the thread."""
        self._stop.set()
        self._thread.join(timeout=5)
        self._send()

    def _run(self) -> None:
        while not self._stop.wait(SECONDS):
            self._send()
            self._say_who_answers()

    def _send(self) -> None:
        for key, value in self._figures().items():
            grown = value - self._sent.get(key, 0)
            if grown > 0:
                self._metrics[key].increment(grown)
                self._sent[key] = value
        cache = plane_cache(self._searcher.index).stats()
        if self._sent.get(("trieton_plane_cache_bytes", "")) != cache.bytes:
            self._set("trieton_plane_cache_bytes", cache.bytes)

    def _say_who_answers(self) -> None:
        # A rollback to a version that is still resident initialises nothing, so whoever answers says who it is.
        if self._executions != self._seen:
            self._seen = self._executions
            if self._metrics["trieton_model_version", ""].value() != self._described["trieton_model_version"]:
                self._describe()

    def _describe(self) -> None:
        for name, value in self._described.items():
            self._set(name, value)

    def _set(self, name: str, value: float) -> None:
        self._metrics[name, ""].set(value)
        self._sent[name, ""] = value

    def _figures(self) -> dict[tuple[str, str], float]:
        totals, cache = self._searcher.totals, plane_cache(self._searcher.index).stats()
        figures = {
            ("trieton_searches", "ok"): totals.searches,
            ("trieton_searches", "invalid"): totals.invalid,
            ("trieton_searches", "cancelled"): totals.cancelled,
            ("trieton_searches", "failed"): totals.failed,
            ("trieton_batches", ""): totals.batches,
            ("trieton_batched_queries", ""): self._queries,
            ("trieton_executions", ""): self._executions,
            ("trieton_levels", ""): totals.levels,
            ("trieton_candidates", ""): totals.ranked,
            ("trieton_results", ""): totals.results,
            ("trieton_short_results", ""): totals.short,
            ("trieton_certified_results", ""): totals.certified,
            ("trieton_unknown_items", ""): totals.unknown_items,
            ("trieton_plane_cache_hits", ""): cache.hits,
            ("trieton_plane_cache_misses", ""): cache.misses,
            ("trieton_plane_cache_evictions", ""): cache.evictions,
            ("trieton_compile_seconds", ""): cache.compile_seconds,
        }
        return figures | {("trieton_stage_seconds", stage): totals.seconds[stage] for stage in STAGES}


def _immortal(metric: Any) -> Any:
    """Keep a metric or family from ever being destroyed, and return it.

    Versions with equal labels share their series in the server: destroying one corrupts the server's memory under the
    others. And destroying it as the interpreter ends, when the way to the server is closed, crashes it. Both seen.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(metric))
    return metric
