"""`trieton probe --live` as the chart runs it: load is not death, and death is seen under load."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import psutil
import pytest
from rollout_help import command, command_here
from test_client_network import eventually
from test_deploy_helm import SOURCE, render
from test_serving_life import mortal  # noqa: F401
from trieton_client import Client
from tritonclient.grpc import service_pb2, service_pb2_grpc

pytestmark = [pytest.mark.server, pytest.mark.case("W33")]


def chart_probe(url: str, model: str, seconds: int) -> list[str]:
    """The chart's liveness command for another server and with less patience."""
    pod = render(SOURCE | {"probe": {"timeoutSeconds": seconds}})["Deployment"]["spec"]["template"]["spec"]
    probe = pod["containers"][0]["livenessProbe"]
    program, *words = probe["exec"]["command"]
    assert program == "trieton"
    assert probe["timeoutSeconds"] > seconds
    return [*words, "--url", url, "--model", model]


@contextmanager
def full_queue(url: str, model: str, rows: int, clients: int = 64) -> Iterator[list[int]]:
    """So many clients ask again and again without a deadline; yields [answers, errors] so far."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="history", datatype="INT64", shape=[rows, 1])
    request.raw_input_contents.append(np.arange(1000, 1000 + rows, dtype=np.int64).tobytes())
    request.parameters["beam_width"].int64_param = 100
    counts, ends = [0, 0], threading.Event()
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        running: set[grpc.Future] = set()

        def ask() -> None:
            call = stub.ModelInfer.future(request)
            running.add(call)
            call.add_done_callback(answered)

        def answered(call: grpc.Future) -> None:
            running.discard(call)
            counts[call.exception() is not None if not call.cancelled() else 1] += 1
            if not ends.is_set():
                ask()

        for _ in range(clients):
            ask()
        try:
            yield counts
        finally:
            ends.set()
            for call in list(running):
                call.cancel()


def test_alive_while_the_queue_is_full_and_requests_are_answered(served):
    words = chart_probe(served.grpc_url, "slow_retriever", 4)
    with full_queue(served.grpc_url, "slow_retriever", 32) as counts:
        assert eventually(lambda: counts[0] > 0, 60)
        done = command_here(*words)
        assert done.returncode == 0, done.stderr
        assert "busy" in done.stdout, "the queue was not long enough"
        plain = command_here(*[word for word in words if word != "--live"], "--timeout", "0.5")
        assert plain.returncode == 1
    assert counts[0] > 0
    with Client(served.grpc_url, model="slow_retriever", timeout=60) as client:
        client.retrieve([1000], num_results=1, beam_width=1)  # the queue is empty again
    done = command_here(*words)
    assert done.returncode == 0, done.stderr
    assert "bundle" in done.stdout


def test_dead_when_the_process_is_killed_under_load(mortal):  # noqa: F811
    words = chart_probe(mortal.grpc_url, "generative_retriever", 4)
    with full_queue(mortal.grpc_url, "generative_retriever", 4) as counts:
        assert eventually(lambda: counts[0] > 0, 60)
        assert command(*words).returncode == 0
        (stub,) = [p for p in psutil.Process(mortal.pid).children(recursive=True) if "stub" in p.name()]
        os.kill(stub.pid, signal.SIGKILL)
        assert eventually(lambda: counts[1] > 0, 30)
        for _ in range(3):  # as often as the chart asks before it restarts
            done = command_here(*words)
            assert done.returncode == 1
            assert "not healthy" in done.stderr


def test_dead_when_the_process_hangs_under_load(mortal):  # noqa: F811
    """A stub that is stopped answers nothing and closes nothing."""
    words = chart_probe(mortal.grpc_url, "generative_retriever", 2)
    (stub,) = [p for p in psutil.Process(mortal.pid).children(recursive=True) if "stub" in p.name()]
    with full_queue(mortal.grpc_url, "generative_retriever", 4) as counts:
        assert eventually(lambda: counts[0] > 0, 60)
        stub.suspend()
        try:
            answered = -1
            while answered != counts[0]:  # what was on its way still arrives
                answered = counts[0]
                eventually(lambda answered=answered: counts[0] != answered, 1)
            done = command_here(*words)
            assert done.returncode == 1
            assert "deadline" in done.stderr.lower()
        finally:
            stub.resume()
        assert eventually(lambda: command_here(*words).returncode == 0, 60)
