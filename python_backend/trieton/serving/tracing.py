"""OpenTelemetry spans of the stages of a search, for requests that carry a trace.

Switched on by the standard variables: with OTEL_EXPORTER_OTLP_ENDPOINT (or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) set,
spans go there by OTLP over HTTP; without, nothing here is imported or done. The spans of a request have as parent

    the server's own span          where the server traces too (--trace-config mode=opentelemetry), else
    the caller's, from the header  `traceparent`, where the server hands it on as a request parameter
                                   (--http-header-forward-pattern, --grpc-header-forward-pattern)

and there are none for a request that has neither, or whose caller does not sample.

    search (bundle, version, batch size, beam width, results, certified, ...)
        prompt, constraint, prefill, decode and step of each level, map
"""

import contextlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from trieton.search.query import Answer, QueryError
from trieton.search.trace import Trace

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
HEADERS = ("traceparent", "tracestate")  # of W3C Trace Context; as request parameters in whatever case they came
LOG = logging.getLogger(__name__)
WAITING = 1000  # searches whose spans are not made yet; more are dropped, for a trace is worth less than an answer
CLOSING_SECONDS = 2.0  # that the end of a process waits for what is not exported yet


def configured() -> bool:
    """Whether the environment names a place for spans."""
    return any(os.environ.get(name) for name in VARIABLES)


def installed() -> bool:
    """Whether the packages of the extra `trace` are there."""
    return find_spec("opentelemetry") is not None and find_spec("opentelemetry.exporter.otlp.proto.http") is not None


class Tracer:
    """Makes and exports the spans of one process, from threads of its own, so that no request waits for it.

    Args:
        attributes: of every search span, such as the bundle's id.
    """

    def __init__(self, attributes: Mapping[str, Any]):
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "trieton"}))
        # Not at exit: a collector that does not answer would hold the process.
        # What a caller's header holds is not to be in the log: it may have line ends, and come with every request.
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("trieton")
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        self._attributes = dict(attributes)
        self._done: queue.Queue[tuple[Trace, Answer | QueryError, float] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name="trieton-spans", daemon=True)
        self._thread.start()

    def parent(self, request: Any, parameters: Mapping[str, Any]) -> Any | None:
        """What the spans of a request belong to; None where there is nothing, or nothing usable or sampled.

        Args:
            request: of the Python backend.
            parameters: of the request.
        """
        carrier: Mapping[str, Any] = {}
        server = request.trace().get_context() if hasattr(request, "trace") else None
        if server:
            try:
                carrier = json.loads(server)
            except ValueError:  # what cannot be read costs the spans, not the answer
                return None
        elif parameters:
            carrier = {name.lower(): value for name, value in parameters.items() if name.lower() in HEADERS}
        if not isinstance(carrier.get("traceparent"), str):
            return None
        context = self._propagator.extract({name: str(value) for name, value in carrier.items()})
        span = self._trace.get_current_span(context).get_span_context()
        return context if span.is_valid and span.trace_flags.sampled else None

    def finish(self, trace: Trace, entry: Answer | QueryError) -> None:
        """Hand a query's trace over; returns at once."""
        with contextlib.suppress(queue.Full):
            self._done.put_nowait((trace, entry, time.perf_counter()))

    def close(self) -> None:
        """Export what is left, for at most `CLOSING_SECONDS`."""
        ending = threading.Thread(target=self._end, daemon=True)
        ending.start()
        ending.join(CLOSING_SECONDS)

    def _end(self) -> None:
        self._done.put(None)
        self._thread.join()
        self._provider.shutdown()

    def _run(self) -> None:
        while (item := self._done.get()) is not None:
            try:
                self._make(*item)
            except Exception:
                # One search whose spans cannot be made must not end them for all that follow.
                LOG.exception("the spans of a search could not be made")

    def _make(self, trace: Trace, entry: Answer | QueryError, ended: float) -> None:
        zero = time.time_ns() - time.perf_counter_ns()  # of the clock that the stages were taken with

        def at(seconds: float) -> int:
            return zero + int(seconds * 1e9)

        attributes = self._attributes | trace.attributes
        if isinstance(entry, QueryError):
            attributes |= {"outcome": entry.kind}
        else:
            attributes |= {"outcome": "ok", "num_results": len(entry.positions), "certified": entry.certified}
        search = self._tracer.start_span(
            "search", trace.parent, start_time=at(trace.started), attributes=_named(attributes)
        )
        below = self._trace.set_span_in_context(search, trace.parent)
        for name, first, last, details in trace.stages:
            span = self._tracer.start_span(name, below, start_time=at(first), attributes=_named(details))
            span.end(at(last))
        if isinstance(entry, QueryError):
            search.set_status(self._trace.Status(self._trace.StatusCode.ERROR, str(entry)))
        search.end(at(ended))


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"trieton.{name}": value for name, value in attributes.items()}
