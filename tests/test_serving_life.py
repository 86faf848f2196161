"""What happens to requests that nobody waits for, to a model whose process is killed, and at the end of the server."""

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from scraped import scrape, settled, value
from trieton_builder.bundle.model_config import render_config
from trieton_builder.cli import app
from trieton_builder.server.process import TritonServer
from trieton_client import Client, DeadlineError, ServerError
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

pytestmark = pytest.mark.server
SLOW = "slow_retriever"
HISTORY = np.arange(1000, 1032).reshape(32, 1)  # a full batch
LEVELS = 32  # of the slow bundle


def large(client: triton.InferenceServerClient, timeout: float | None = None, beam_width: int = 256) -> None:
    tensor = triton.InferInput("history", HISTORY.shape, "INT64").set_data_from_numpy(HISTORY)
    client.infer(SLOW, [tensor], parameters={"beam_width": beam_width}, client_timeout=timeout)


def cancelled(server: TritonServer) -> float:
    return value(scrape(server.metrics_url), "trieton_searches_total", model=SLOW, outcome="cancelled")


def eventually(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether something comes true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not (true := holds()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return true


@pytest.mark.case("S08")
def test_work_stops_when_the_deadline_passes_while_decoding_and_while_queued(served):
    """What was done is counted in levels: seconds would depend on who else uses the machine."""
    whole, one = len(HISTORY) * LEVELS, LEVELS

    def done() -> tuple[float, float]:
        series = settled(served.metrics_url)
        return value(series, "trieton_levels_total", model=SLOW), cancelled(served)

    with triton.InferenceServerClient(served.grpc_url) as client, Client(served.grpc_url, model=SLOW) as small:
        before = done()
        large(client)
        after = done()
        assert after[0] - before[0] == whole
        # While decoding: the client leaves once the search is at work, and before its end.
        for pause in (0.05, 0.1, 0.2, 0.4, 0.8):
            with pytest.raises(InferenceServerException, match=r"(?i)deadline"):
                large(client, timeout=pause)
            small.retrieve([1000], num_results=1, beam_width=1)
            before, after = after, done()
            levels = after[0] - before[0] - one
            assert levels < whole, "the abandoned search went on to its end"
            if levels:
                assert after[1] - before[1] == len(HISTORY)
                break
        else:
            pytest.fail("every search was abandoned before it began")
        # While queued: three wait behind one that runs, and leave; only the one that runs is done.
        answers: queue.Queue = queue.Queue()
        tensor = triton.InferInput("history", HISTORY.shape, "INT64").set_data_from_numpy(HISTORY)
        client.async_infer(SLOW, [tensor], lambda result, error: answers.put(error), parameters={"beam_width": 256})
        for _ in range(3):
            with contextlib.suppress(InferenceServerException):
                large(client, timeout=0.02)
        small.retrieve([1000], num_results=1, beam_width=1)
        assert answers.get(timeout=120) is None
        before, after = after, done()
        assert after[0] - before[0] - whole - one < whole, "searches that nobody waited for were done"
        # One whose time was up before the server had read it was never a search.
        assert after[1] - before[1] in [count * len(HISTORY) for count in (1, 2, 3)]


@pytest.mark.case("S08")
def test_who_leaves_a_batch_that_goes_on_is_cancelled_and_the_others_are_answered(served):
    """Eight requests of four rows wait while another is searched, so they share a batch, which one of them leaves."""
    parts = [HISTORY[4 * n : 4 * n + 4] for n in range(8)]
    done: dict[int, object] = {}
    with triton.InferenceServerClient(served.grpc_url) as client:

        def ask(n: int, history: np.ndarray) -> Any:
            tensor = triton.InferInput("history", history.shape, "INT64").set_data_from_numpy(history)
            keep = functools.partial(lambda n, result, error: done.update({n: error or result}), n)
            return client.async_infer(SLOW, [tensor], keep, parameters={"beam_width": 256})

        def answers(count: int) -> dict[int, object]:
            assert eventually(lambda: len(done) == count, 120)
            found = done.copy()
            done.clear()
            return found

        def waiting() -> float:
            return value(scrape(served.metrics_url), "nv_inference_pending_request_count", model=SLOW)

        def whole_batches() -> int:
            (stats,) = client.get_inference_statistics(SLOW).model_stats
            return sum(entry.compute_infer.count for entry in stats.batch_stats if entry.batch_size == 32)

        for n, history in enumerate(parts):
            ask(n, history)
        alone = answers(8)
        for _ in range(20):
            before, formed = cancelled(served), whole_batches()
            ask(-1, HISTORY[:31])
            calls = [ask(n, history) for n, history in enumerate(parts)]
            # The first is answered, so the eight that waited are being searched: now one leaves.
            assert eventually(lambda: -1 in done, 60)
            assert eventually(
                lambda: value(scrape(served.metrics_url), "nv_inference_pending_request_count", model=SLOW) == 0, 60
            )
            calls[3].cancel()
            found = answers(9)
            left = isinstance(found.pop(3), InferenceServerException)
            if (
                left
                and eventually(lambda formed=formed: whole_batches() > formed, 5)
                and eventually(lambda before=before: cancelled(served) == before + 4, 5)
            ):
                break
        else:
            pytest.fail("nobody left a batch that went on")
    for n in set(range(8)) - {3}:
        assert (found[n].as_numpy("item_ids") == alone[n].as_numpy("item_ids")).all()
        np.testing.assert_allclose(found[n].as_numpy("scores"), alone[n].as_numpy("scores"), atol=1e-4)


def test_a_passed_deadline_is_told_as_such_over_both_protocols(served):
    for protocol, url in (("grpc", served.grpc_url), ("http", served.http_url)):
        with Client(url, protocol, model=SLOW) as client:
            client.facts()
            with pytest.raises(DeadlineError):
                client.retrieve(HISTORY, beam_width=256, timeout=0.05)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


@pytest.fixture
def mortal(tiny_bundle, tmp_path):
    """A server of one's own, to be hurt."""
    model = tmp_path / "models" / "generative_retriever"
    model.mkdir(parents=True)
    (model / "config.pbtxt").write_text(render_config(max_batch_size=4))
    shutil.copytree(tiny_bundle, model / "1")
    with TritonServer(tmp_path / "models", exit_timeout=3) as server:
        yield server


@pytest.mark.case("S07")
def test_the_probe_notices_a_killed_process_and_its_remedy_brings_the_model_back(mortal, tmp_path):
    assert run("probe", "--url", mortal.grpc_url)[0] == 0
    assert run("probe", "--url", mortal.http_url, "--protocol", "http")[0] == 0
    with Client(mortal.grpc_url) as client:
        before = client.retrieve([1003])
        (stub,) = [p for p in psutil.Process(mortal.pid).children(recursive=True) if "stub" in p.name()]
        os.kill(stub.pid, signal.SIGKILL)
        with pytest.raises(ServerError):
            client.retrieve([1003])
        with urllib.request.urlopen(f"http://{mortal.http_url}/v2/health/ready", timeout=5) as answer:
            assert answer.status == 200, (
                "the server's own health does not notice; should it one day, simplify the probe"
            )
        code, output = run("probe", "--url", mortal.grpc_url, "--timeout", "5")
        assert code == 1
        assert "revive" in output
        remedy = ("--revive", tmp_path / "models", "--control-key", mortal.control_key)
        code, output = run("probe", "--url", mortal.grpc_url, "--timeout", "5", *remedy)
        assert code == 0, output
        assert "revived" in output
        after = client.retrieve([1003])
    assert after.item_ids.tolist() == before.item_ids.tolist()


def test_a_probe_of_nobody_fails_within_its_deadline():
    started = time.perf_counter()
    code, output = run("probe", "--url", "127.0.0.1:1", "--timeout", "1")
    assert code == 1
    assert "127.0.0.1:1" in output
    assert time.perf_counter() - started < 30


def test_query_prints_a_table_and_json(served):
    code, output = run("query", 1003, 1010, "--url", served.grpc_url, "-k", 3, "-c", "even", "--exclude", "1004,1006")
    assert code == 0, output
    assert "semantic ID" in output
    code, output = run("query", 1003, "--url", served.http_url, "-p", "http", "--json", "--watch", 0.01, "--times", 2)
    assert code == 0, output
    first = json.loads(output[: len(output) // 2])
    assert first["num_results"] == 10
    assert run("query", "item-1003", "-u", served.grpc_url, "-m", "text_retriever", "--json")[0] == 0
    code, output = run("query", "abc", "--url", served.grpc_url)
    assert code == 1
    assert "integers, got 'abc'" in output
