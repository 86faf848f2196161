"""Spans of requests that carry a trace, from the real server to a collector that is a small HTTP server here."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from trieton.search.query import QueryError
from trieton.serving import tracing
from trieton_builder.bundle.model_config import ENSEMBLE_NAME, MODEL_NAME, render_config, render_ensemble_config
from trieton_builder.server.process import TritonServer
from trieton_client import AsyncClient, Client
from tritonclient.utils import InferenceServerException

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER}-01"
STAGES = ["prompt", "constraint", "prefill", *["decode", "step"] * 3, "map"]


class Collector:
    """Takes what is exported to it; with `hang` it accepts and never answers."""

    def __init__(self) -> None:
        self.hang, self.over = False, threading.Event()
        self.bodies: list[tuple[str, bytes]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if collector.hang:
                    collector.over.wait(60)
                    return
                collector.bodies.append((self.headers["content-type"], body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list:
        """What the models have exported. (The server itself would export JSON.)"""
        found = []
        for kind, body in list(self.bodies):
            if kind == "application/x-protobuf":
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {a.key: a.value.string_value for a in resource.resource.attributes}
                    assert names["service.name"] == "trieton"
                    found += [span for scope in resource.scope_spans for span in scope.spans]
        return found

    def wait(self, searches: int) -> list:
        """All spans, once those of so many searches are there."""
        deadline = time.monotonic() + 60
        while sum(span.name == "search" for span in self.spans()) < searches and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.spans()

    def close(self) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def repository(tiny_bundle, tmp_path):
    root = tmp_path / "models"
    (root / MODEL_NAME).mkdir(parents=True)
    (root / MODEL_NAME / "config.pbtxt").write_text(render_config())
    (root / MODEL_NAME / "1").symlink_to(tiny_bundle)
    (root / ENSEMBLE_NAME / "1").mkdir(parents=True)
    (root / ENSEMBLE_NAME / "config.pbtxt").write_text(render_ensemble_config())
    return root


def ask(client, model: str, headers: dict[str, str] | None = None, rows: int = 1, **parameters: object) -> np.ndarray:
    module = triton if isinstance(client, triton.InferenceServerClient) else triton_http
    tensor = module.InferInput("history", [rows, 1], "INT64").set_data_from_numpy(np.array([[1003]] * rows))
    return client.infer(model, [tensor], headers=headers, parameters=parameters).as_numpy("item_ids")


async def ask_async(url: str, protocol: str) -> None:
    async with AsyncClient(url, protocol) as client:
        await client.retrieve([1003], headers={"traceparent": PARENT})


def posted(server: TritonServer, header: bytes, constraint: bytes = b"even") -> int:
    """Status of a request with lines of a header that no client library would send."""
    history = b'"inputs":[{"name":"history","shape":[1,1],"datatype":"INT64","data":[1003]}]'
    body = b'{"parameters":{"constraint":"%s"},%s}' % (constraint, history)
    with socket.create_connection(("127.0.0.1", int(server.http_url.partition(":")[2])), timeout=10) as connection:
        start = f"POST /v2/models/{MODEL_NAME}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
        connection.sendall(start + b"Connection: close\r\n" + header + b"\r\n\r\n" + body)
        return int(connection.makefile("rb").readline().split()[1])


def attributes(span) -> dict[str, object]:
    return {a.key.removeprefix("trieton."): getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.mark.server
def test_a_request_with_a_trace_yields_spans_and_no_other_does(repository, tiny_bundle, collector):
    quick = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
    server = TritonServer(repository, load=(MODEL_NAME, ENSEMBLE_NAME), trace_endpoint=collector.url, env=quick)
    with server, triton.InferenceServerClient(server.grpc_url) as client:
        plain = ask(client, MODEL_NAME, num_results=4)
        for bad in ("garbage", "", f"00-{'0' * 32}-{CALLER}-01", f"00-{TRACE}-{CALLER}", "00-" * 1000, f"ff-{TRACE}"):
            assert (ask(client, MODEL_NAME, {"traceparent": bad}, num_results=4) == plain).all()
        unsampled = f"00-{TRACE}-{CALLER}-00"
        assert (ask(client, MODEL_NAME, {"traceparent": unsampled}, num_results=4) == plain).all()
        assert (ask(client, MODEL_NAME, traceparent=7, num_results=4) == plain).all()

        headers = {"traceparent": PARENT, "tracestate": "shop=1"}
        before = time.time_ns()
        assert (ask(client, MODEL_NAME, headers, num_results=4, constraint="even or not even") == plain).all()
        after = time.time_ns()
        spans = collector.wait(1)
        (search,) = [span for span in spans if span.name == "search"]
        assert (search.trace_id.hex(), search.parent_span_id.hex()) == (TRACE, CALLER)
        assert search.trace_state == "shop=1"
        assert before <= search.start_time_unix_nano < search.end_time_unix_nano <= after
        said = attributes(search)
        assert said.pop("ranked") > 0
        assert said.pop("bundle_id") == json.loads((tiny_bundle / "manifest.json").read_text())["bundle_id"]
        assert isinstance(said.pop("certified"), bool)
        assert (said.pop("model"), said.pop("model_version")) == (MODEL_NAME, 1)
        assert said == {"outcome": "ok", "batch_size": 1, "beam_width": 20, "num_results": 4}
        stages = sorted((span for span in spans if span.name != "search"), key=lambda span: span.start_time_unix_nano)
        assert [span.name for span in stages] == STAGES
        assert {(span.trace_id.hex(), span.parent_span_id) for span in stages} == {(TRACE, search.span_id)}
        times = [t for span in stages for t in (span.start_time_unix_nano, span.end_time_unix_nano)]
        assert times == sorted(times)
        assert search.start_time_unix_nano <= times[0]
        assert times[-1] <= search.end_time_unix_nano
        assert [attributes(span)["level"] for span in stages if span.name == "step"] == [0, 1, 2]

        # Whatever bytes the header or one like it holds, over HTTP too; and none of it is in the log.
        assert (ask(client, MODEL_NAME, {"traceparent-bin": b"\xff"}, num_results=4) == plain).all()
        assert posted(server, b"TraceParent: \xff\xfe\r\nx-traceparent: 1") == 200
        assert posted(server, b"traceparent: \xff", constraint=b"even") == 200
        assert posted(server, b"traceparent: \xff", constraint=b"even\xff") == 400
        ask(client, MODEL_NAME, traceparent=PARENT, tracestate="a=b\nI1130 forged")
        assert [span.trace_state for span in collector.wait(2) if span.name == "search"] == ["shop=1", ""]
        assert "forged" not in server.log_path.read_text()
        collector.bodies.clear()

        # Over HTTP, whatever the case; through the ensemble; of several rows each; and of one with a fault.
        http = triton_http.InferenceServerClient(server.http_url)
        ask(http, MODEL_NAME, {"Traceparent": PARENT})
        http.close()
        ask(client, ENSEMBLE_NAME, {"traceparent": PARENT})
        ask(client, MODEL_NAME, {"traceparent": PARENT}, rows=3)
        with pytest.raises(InferenceServerException):
            ask(client, MODEL_NAME, {"traceparent": PARENT}, constraint="no_such_set")
        for url, protocol in ((server.grpc_url, "grpc"), (server.http_url, "http")):
            with Client(url, protocol, headers={"x-own": "kept"}) as ours:
                ours.retrieve([1003], headers={"traceparent": PARENT})
                ours.retrieve([1003])
            asyncio.run(ask_async(url, protocol))
        searches = [span for span in collector.wait(10) if span.name == "search"]
        assert [span.parent_span_id.hex() for span in searches] == [CALLER] * 10
        (failed,) = [span for span in searches if attributes(span)["outcome"] == "invalid"]
        assert "no_such_set" in failed.status.message

        # A collector that hangs holds neither a search nor the end.
        collector.hang = True
        started = time.perf_counter()
        for _ in range(50):
            ask(client, MODEL_NAME, {"traceparent": PARENT})
        assert time.perf_counter() - started < 60, "each waited for the collector"
        assert server.stop() == 0, "held beyond its exit timeout, and killed"


@pytest.mark.server
def test_spans_lie_below_those_of_the_server_where_it_traces_itself(repository, collector):
    config = (
        "mode=opentelemetry", "level=TIMESTAMPS", "rate=1000000000", f"opentelemetry,url={collector.url}/v1/traces",
        "opentelemetry,bsp_schedule_delay=50",
    )  # fmt: skip
    env = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    options = [f"--trace-config={setting}" for setting in config]
    with (
        TritonServer(repository, env=env, extra_args=options) as server,
        triton.InferenceServerClient(server.grpc_url) as client,
    ):
        ask(client, MODEL_NAME)
        ask(client, MODEL_NAME, {"traceparent": PARENT})
        (search,) = [span for span in collector.wait(1) if span.name == "search"]
    assert search.trace_id.hex() == TRACE
    theirs = {}
    for kind, body in collector.bodies:
        if kind == "application/json":
            for resource in json.loads(body)["resourceSpans"]:
                theirs |= {span["spanId"]: span for scope in resource["scopeSpans"] for span in scope["spans"]}
    ids, at = {span["parentSpanId"].lower() for span in theirs.values()}, search.parent_span_id.hex()
    assert CALLER in ids
    assert at in {name.lower() for name in theirs}, "not below a span of the server"


def test_a_search_whose_spans_cannot_be_made_costs_no_other_its_spans(collector, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    tracer = tracing.Tracer({"model": "here"})
    parent = tracer.parent(object(), {"traceparent": PARENT})
    for attributes in (None, {"tokens": 1}):  # None cannot be read
        trace = tracing.Trace(parent)
        trace.stage("prompt", time.perf_counter(), time.perf_counter(), attributes)
        tracer.finish(trace, QueryError("no"))
    tracer.close()
    spans = collector.wait(1)
    assert [span.name for span in spans if span.name == "prompt"] == ["prompt"]
    assert "the spans of a search could not be made" in caplog.text


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported():
    code = (
        "import sys, trieton.search.searcher, trieton.serving.tracing as t; "
        "print(t.configured(), 'opentelemetry' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={}, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
