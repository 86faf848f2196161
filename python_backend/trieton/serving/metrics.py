"""Figures of a running instance, in the server's own metrics endpoint.

Labels of every series: `model`, `version`, and `model_instance`, the name that the server gives to one process of a
model, so each series has one writer. `trieton_bundle_info` has `bundle_id` as well and is 1 while that version is
loaded. Counters end in `_total`. The server cannot forget a series: those of an unloaded version stay until it is
restarted, its gauges at 0 and its counters at their last value; one version adds about 35 series per instance.

How long requests wait is the server's to say (nv_inference_queue_duration_us, nv_inference_pending_request_count): the
Python backend is not told when a request arrived.
"""

import ctypes
import logging
import threading
from typing import Any

from trieton.constraint.compile import plane_cache
from trieton.search.searcher import STAGES, Searcher

LOG = logging.getLogger(__name__)
SECONDS = 0.5  # how often figures travel; each one is a message to the server, too dear to send per request

OUTCOMES = ("ok", "invalid", "cancelled", "failed")
COUNTERS = {
    "trieton_searches_total": ("Queries by how they ended", "outcome"),
    "trieton_batches_total": ("Calls of the beam search", None),
    "trieton_batched_queries_total": ("Queries in the batches that the server formed", None),
    "trieton_executions_total": ("Batches that the server formed", None),
    "trieton_levels_total": ("Levels searched, summed over queries", None),
    "trieton_candidates_total": ("Candidates that had to be ranked; kernel gpu does not count", None),
    "trieton_results_total": ("Items returned", None),
    "trieton_short_results_total": ("Queries with fewer items than asked for", None),
    "trieton_certified_results_total": ("Queries whose result is proven to be the true top", None),
    "trieton_unknown_items_total": ("History items that the catalogue does not have", None),
    "trieton_unknown_listed_items_total": ("Items of include and exclude lists that the catalogue does not have", None),
    "trieton_stage_seconds_total": ("Time by stage of the search", "stage"),
    "trieton_plane_cache_hits_total": ("Constraints found compiled", None),
    "trieton_plane_cache_misses_total": ("Constraints compiled", None),
    "trieton_plane_cache_evictions_total": ("Compiled constraints dropped for space", None),
    "trieton_compile_seconds_total": ("Time spent compiling constraints", None),
}
GAUGES = {
    "trieton_plane_cache_bytes": "Size of the compiled constraints held; 0 once the version is unloaded",
    "trieton_index_items": "Items of the version; 0 once it is unloaded",
    "trieton_index_leaves": "Distinct semantic IDs of the version; 0 once it is unloaded",
    "trieton_index_bytes": "Size of the trie of the version; 0 once it is unloaded",
    "trieton_ready_time_seconds": "Unix time at which the version became ready; 0 once it is unloaded",
    "trieton_bundle_info": "1 for the bundle of the version; 0 once it is unloaded",
}


class Reporter:
    """Sends what has changed twice a second, from a thread of its own, so that no request waits for it."""

    def __init__(self, pb_utils: Any, searcher: Searcher, *, model: str, version: str, instance: str, now: float):
        self._searcher = searcher
        self._executions = self._queries = 0
        self._sent: dict[tuple[str, str], float] = {}
        self._metrics: dict[tuple[str, str], Any] = {}
        common = {"model": model, "version": version, "model_instance": instance}
        kinds = pb_utils.MetricFamily
        for name, (text, label) in COUNTERS.items():
            family = _immortal(kinds(name=name, description=text, kind=kinds.COUNTER))
            for value in {"outcome": OUTCOMES, "stage": STAGES, None: ("",)}[label]:
                labels = common | ({label: value} if label else {})
                self._metrics[name, value] = _immortal(family.Metric(labels=labels))
        for name, text in GAUGES.items():
            family = _immortal(kinds(name=name, description=text, kind=kinds.GAUGE))
            own = {"bundle_id": searcher.bundle.bundle_id} if name == "trieton_bundle_info" else {}
            self._metrics[name, ""] = _immortal(family.Metric(labels=common | own))
        index = searcher.index
        self._described: dict[str, float] = {
            "trieton_index_items": index.num_items,
            "trieton_index_leaves": index.num_leaves,
            "trieton_index_bytes": index.nbytes,
            "trieton_ready_time_seconds": now,
            "trieton_bundle_info": 1,
        }
        self._sending = threading.Lock()  # held while figures travel, and for ever once the last ones have
        self._tick()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trieton-metrics", daemon=True)
        self._thread.start()

    def batch(self, queries: int) -> None:
        """Note one batch of the server."""
        self._executions += 1
        self._queries += queries

    def close(self) -> None:
        """Send what is left, set the gauges to 0 and end the thread."""
        self._stop.set()
        self._thread.join(timeout=5)
        # Not released: nothing may be sent after this, not even by a thread that is late.
        if self._sending.acquire(timeout=5):
            self._send_counters()
            for name in GAUGES:
                self._metrics[name, ""].set(0)

    def _run(self) -> None:
        failing = False
        while not self._stop.wait(SECONDS):
            try:
                self._tick()
                failing = False
            except Exception:
                # Figures that cannot travel now are sent later: counters send what has grown since.
                if not failing:
                    LOG.exception("metrics could not be sent; trying again")
                failing = True

    def _tick(self) -> None:
        if not self._sending.acquire(blocking=False):
            return
        try:
            self._send_counters()
            self._send_gauges()
        finally:
            self._sending.release()

    def _send_counters(self) -> None:
        for key, value in self._figures().items():
            grown = value - self._sent.get(key, 0)
            if grown > 0:
                self._metrics[key].increment(grown)
                self._sent[key] = value

    def _send_gauges(self) -> None:
        # A version that is loaded again while it serves is set to 0 by the process that it replaces, which ends later.
        if self._metrics["trieton_bundle_info", ""].value() != 1:
            self._sent.pop(("trieton_plane_cache_bytes", ""), None)
            for name, value in self._described.items():
                self._metrics[name, ""].set(value)
        cached = plane_cache(self._searcher.index).stats().bytes
        if self._sent.get(("trieton_plane_cache_bytes", "")) != cached:
            self._metrics["trieton_plane_cache_bytes", ""].set(cached)
            self._sent["trieton_plane_cache_bytes", ""] = cached

    def _figures(self) -> dict[tuple[str, str], float]:
        totals, cache = self._searcher.totals, plane_cache(self._searcher.index).stats()
        figures = {
            ("trieton_searches_total", "ok"): totals.searches,
            ("trieton_searches_total", "invalid"): totals.invalid,
            ("trieton_searches_total", "cancelled"): totals.cancelled,
            ("trieton_searches_total", "failed"): totals.failed,
            ("trieton_batches_total", ""): totals.batches,
            ("trieton_batched_queries_total", ""): self._queries,
            ("trieton_executions_total", ""): self._executions,
            ("trieton_levels_total", ""): totals.levels,
            ("trieton_candidates_total", ""): totals.ranked,
            ("trieton_results_total", ""): totals.results,
            ("trieton_short_results_total", ""): totals.short,
            ("trieton_certified_results_total", ""): totals.certified,
            ("trieton_unknown_items_total", ""): totals.unknown_items,
            ("trieton_unknown_listed_items_total", ""): totals.unknown_listed,
            ("trieton_plane_cache_hits_total", ""): cache.hits,
            ("trieton_plane_cache_misses_total", ""): cache.misses,
            ("trieton_plane_cache_evictions_total", ""): cache.evictions,
            ("trieton_compile_seconds_total", ""): cache.compile_seconds,
        }
        return figures | {("trieton_stage_seconds_total", stage): totals.seconds[stage] for stage in STAGES}


def _immortal(metric: Any) -> Any:
    """Keep a metric or family from ever being destroyed, and return it.

    Processes of one version that follow each other share their series in the server: destroying one corrupts the
    server's memory under the others. And destroying it as the interpreter ends, when the way to the server is closed,
    crashes it. Both seen on 2.51.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(metric))
    return metric
