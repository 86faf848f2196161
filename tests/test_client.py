"""The clients against the real server: one interface for both protocols, sync and async, threads, outages."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest
from network import Relay
from tiny_bundle import tiny_catalogue
from trieton_client import (
    AsyncClient,
    Client,
    ClientError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    Results,
    ServerError,
    Tls,
    UnavailableError,
)

pytestmark = pytest.mark.server
CATALOGUE = tiny_catalogue()
PROTOCOLS = ("grpc", "http")


def address(served, protocol: str) -> str:
    return served.grpc_url if protocol == "grpc" else served.http_url


class Blocking:
    """An AsyncClient with the interface of Client, so that every test below runs on all four clients."""

    def __init__(self, *arguments, **options):
        self.loop = asyncio.new_event_loop()
        self.client = AsyncClient(*arguments, **options)

    def retrieve(self, *arguments, **options):
        return self.loop.run_until_complete(self.client.retrieve(*arguments, **options))

    def facts(self):
        return self.loop.run_until_complete(self.client.facts())

    def describe(self):
        return self.loop.run_until_complete(self.client.describe())

    def close(self):
        self.loop.run_until_complete(self.client.close())

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
        self.loop.close()


@pytest.fixture(params=[(Client, "grpc"), (Client, "http"), (Blocking, "grpc"), (Blocking, "http")], scope="module")
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def client(served, kind):
    make, protocol = kind
    with make(address(served, protocol), protocol) as client:
        yield client


@pytest.fixture(scope="module")
def text_client(served, kind):
    make, protocol = kind
    with make(address(served, protocol), protocol, model="text_retriever") as client:
        yield client


def same(a: Results, b: Results) -> bool:
    return list(a) == list(b) and a.codes.tolist() == b.codes.tolist()


def test_one_history_gives_one_result_with_everything_typed(client):
    results = client.retrieve([1003, 5, 1010], num_results=7, constraint="even", exclude=[1004])
    assert isinstance(results, Results)
    assert results.item_ids.dtype == np.int64
    assert results.scores.dtype == np.float32
    assert results.codes.shape == (7, 3)
    assert len(results) == results.num_results == 7
    assert (results.num_unknown, results.model_version, len(results.bundle_id)) == (1, "1", 16)
    assert set(results.item_ids) <= set(CATALOGUE.allowed("even", exclude=[1004]))
    assert all(isinstance(item, int) and isinstance(score, float) for item, score in results)
    with pytest.raises(AttributeError):
        results.num_results = 3  # type: ignore[misc]


@pytest.mark.case("L02")
def test_more_histories_than_the_batch_size_are_sent_in_chunks_and_come_back_in_order(client):
    assert client.facts().max_batch_size == 32
    histories = [CATALOGUE.ids[i : i + 1 + i % 7] for i in range(75)]
    exclude = [[item] for item in CATALOGUE.ids[:75]]
    together = client.retrieve(histories, num_results=3, exclude=exclude)
    assert len(together) == 75
    for place in (0, 31, 32, 63, 64, 74):
        alone = client.retrieve(histories[place], num_results=3, exclude=exclude[place])
        assert alone.item_ids.tolist() == together[place].item_ids.tolist()
        np.testing.assert_allclose(alone.scores, together[place].scores, atol=1e-5)


def test_lists_arrays_and_one_list_for_all_are_the_same(client):
    histories = [[1003, 1010], [1004, 1020]]
    first = client.retrieve(histories, exclude=[1001, 1002])
    for second in (
        client.retrieve(np.array(histories), exclude=np.array([1001, 1002])),
        client.retrieve(histories, exclude=[[1001, 1002], [1002, 1001, 1001]]),
        client.retrieve(histories, exclude={1001, 1002}),
    ):
        assert all(map(same, first, second))


def test_an_include_list_holds_and_tokens_work_in_place_of_a_history(client):
    results = client.retrieve([1003], include=[1001, 1002, 7])
    assert sorted(results.item_ids) == [1001, 1002]
    assert results.certified
    assert len(client.retrieve(input_ids=[3, 4, 5], num_results=4)) == 4
    assert len(client.retrieve(input_ids=[[3], [4, 5]], num_results=4)) == 2


def test_string_ids(text_client):
    results = text_client.retrieve(["item-1003", "item-1010"], include=["item-1001", "item-1002"])
    assert sorted(results.item_ids) == ["item-1001", "item-1002"]
    one, two = text_client.retrieve([["item-1003"], ["item-1004", "item-1005", "nobody"]], exclude=["item-1001"])
    assert (one.num_unknown, two.num_unknown) == (0, 1)
    with pytest.raises(InvalidRequestError, match="item ids are strings, got 5 at 0"):
        text_client.retrieve([5])


@pytest.mark.case("W54")
def test_an_id_that_is_half_a_character_is_refused(text_client):
    for name, given in [
        ("history", {"history": ["item-1003", "a\ud83d"]}),
        ("exclude", {"history": ["item-1003"], "exclude": ["\udfff"]}),
        ("include", {"history": ["item-1003"], "include": [b"\xff"]}),
    ]:
        with pytest.raises(InvalidRequestError, match=f"^{name}: "):
            text_client.retrieve(**given)
    assert text_client.retrieve(["item-1003", "\U0001f600", b"item-1004"]).num_unknown == 1


@pytest.mark.case("W42")
def test_unknown_ids_are_counted_and_strict_refuses_them(client):
    results = client.retrieve([1003, 5], include=[7, 8], exclude=[1004, 9])
    assert (len(results), results.num_unknown, results.num_unknown_listed) == (0, 1, 3)
    results = client.retrieve([1003], include=[1001, 1002])
    assert (results.num_unknown, results.num_unknown_listed) == (0, 0)
    assert len(client.retrieve([1003], include=[1001], strict=True)) == 1
    for bad in ({"history": [1003, 5]}, {"history": [1003], "include": [1001, 7]}, {"history": [1], "exclude": [7]}):
        with pytest.raises(InvalidRequestError, match=r"not in the catalogue"):
            client.retrieve(**bad, strict=True)


@pytest.mark.case("W42")
def test_the_rows_of_a_batch_may_fail_one_by_one(client):
    histories = [[1000 + n] for n in range(70)]
    histories[40] = [5]
    with pytest.raises(InvalidRequestError, match="row 40: history"):
        client.retrieve(histories)
    rows = client.retrieve(histories, num_results=2, return_errors=True)
    assert [place for place, row in enumerate(rows) if isinstance(row, ClientError)] == [40]
    assert "row 40" in rows[40].reason
    assert same(rows[41], client.retrieve([1041], num_results=2))


def test_each_history_may_have_a_constraint_of_its_own(client):
    wishes = ["even", None, "rare", "third and not even", None, "even"]
    rows = client.retrieve(
        [[1003 + n] for n in range(6)], num_results=5, constraint=wishes, exclude=[[1000 + n] for n in range(6)]
    )
    for n, (row, wish) in enumerate(zip(rows, wishes, strict=True)):
        alone = client.retrieve([1003 + n], num_results=5, constraint=wish, exclude=[1000 + n])
        assert row.item_ids.tolist() == alone.item_ids.tolist()
        assert set(row.item_ids) <= set(CATALOGUE.allowed(wish, exclude=[1000 + n]))
    many = client.retrieve([[1003]] * 80, num_results=1, constraint=["even", "third"] * 40)
    assert len({int(row.item_ids[0]) for row in many[::2]}) == 1
    assert len(many) == 80


def test_a_server_describes_itself(client):
    found = client.describe()
    assert set(found["sets"]) == {"even", "third", "rare", "none_at_all"}
    assert found["item_id_type"] == "int64"
    assert found["limits"]["max_batch_size"] == client.facts().max_batch_size == 32
    assert found["bundle_id"] == client.retrieve([1003]).bundle_id


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "either history or input_ids, got none"),
        ({"history": [1003], "input_ids": [1]}, "either history or input_ids, got both"),
        ({"history": []}, "expected one of them, got neither"),
        ({"history": "1003"}, "history: expected a list of ids, got str"),
        ({"history": ["a"]}, "history: this catalogue's item ids are 64-bit integers"),
        ({"history": [1.5]}, "history: this catalogue's item ids are 64-bit integers"),
        ({"history": [1003, -1]}, "history: -1 is not an item id"),
        ({"history": [2**63]}, "64-bit integers"),
        ({"history": [1003], "include": []}, "include: an empty list allows nothing"),
        ({"history": [1003], "exclude": [[1], [2]]}, "exclude: expected one list, or one per history"),
        ({"history": [[1003], [1004]], "exclude": [[1], [2], [3]]}, "one per history (2), got 3 lists"),
        ({"history": [1003], "num_results": "3"}, "num_results: expected an integer, got '3'"),
        ({"history": [1003], "num_results": 0}, "num_results: expected 1 to 100, got 0"),
        ({"history": [1003], "constraint": 5}, "constraint: expected text, got int"),
        ({"history": [1003], "constraint": b"even"}, "constraint: expected text, got bytes"),
        ({"history": [1003], "constraint": "a\ud800"}, "constraint: expected text, got 'a\\ud800'"),
        ({"history": [1003], "constraint": ["even"]}, "constraint: expected one text"),
        ({"history": [[1003], [1004]], "constraint": ["even"]}, "one per history (2), got a list of 1"),
        ({"history": [[1003], [1004]], "constraint": ["even", 5]}, "constraint: expected text, got int"),
        ({"history": [[1003], [1004]], "constraint": ["even", "nowhere"]}, "row 1: "),
        ({"history": [1003], "num_results": 2**63}, f"num_results: expected an integer of 64 bits, got {2**63}"),
        ({"history": [1003], "num_results": True}, "num_results: expected an integer, got True"),
        ({"history": [1003], "num_results": 3.0}, "num_results: expected an integer, got 3.0"),
        ({"history": [1003], "num_results": float("nan")}, "num_results: expected an integer, got nan"),
        ({"history": [1003], "num_results": np.uint64(2**63)}, "64 bits"),
        ({"history": [1003], "num_results": -5}, "num_results: expected 1 to 100, got -5"),
        ({"history": [1003], "beam_width": -(2**70)}, "beam_width: expected an integer of 64 bits"),
        ({"history": [1003], "beam_width": 0}, "beam_width"),
        ({"history": [1003], "strict": 1}, "strict: expected True or False, got 1"),
        ({"history": [1003], "return_errors": "no"}, "return_errors: expected True or False"),
        ({"history": [1003, [1004]]}, "history: "),
        ({"history": [[[1003]]]}, "history: "),
        ({"history": [float("nan")]}, "64-bit integers"),
        ({"history": [True, False]}, "64-bit integers"),
        ({"input_ids": [1, [2]]}, "input_ids: expected a list of tokens"),
        ({"history": [1003], "constraint": "nowhere"}, "nowhere"),
        ({"history": [[1003], [5]]}, "row 1: history: none of the 1 item ids"),
        ({"input_ids": [2**40]}, "input_ids: expected a list of tokens"),
    ],
)
def test_a_bad_request_raises_invalid_request_with_the_reason(client, options, text):
    with pytest.raises(InvalidRequestError) as caught:
        client.retrieve(**options)
    assert text in caught.value.reason
    assert isinstance(caught.value, ClientError | ValueError)


def test_an_unknown_model_is_not_found(served, kind):
    make, protocol = kind
    with make(address(served, protocol), protocol, model="nobody") as client, pytest.raises(ClientError) as caught:
        client.retrieve([1003])
    assert isinstance(caught.value, NotFoundError | InvalidRequestError)  # HTTP says 400, gRPC says not found
    assert "nobody" in caught.value.reason


@pytest.mark.case("L01")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_two_hundred_requests_of_eight_threads_through_one_client(served, protocol):
    with Client(address(served, protocol), protocol) as client:
        want = {i: client.retrieve([1000 + i], num_results=1 + i % 9) for i in range(40)}

        def ask(n: int) -> bool:
            got = client.retrieve([1000 + n % 40], num_results=1 + (n % 40) % 9)
            return got.item_ids.tolist() == want[n % 40].item_ids.tolist()

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(ask, range(200)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_async_client_keeps_many_requests_in_flight(served, protocol):
    async def main() -> list[Results]:
        async with AsyncClient(address(served, protocol), protocol) as client:
            return await asyncio.gather(*(client.retrieve([1000 + i], num_results=2) for i in range(64)))

    results = asyncio.run(main())
    with Client(served.grpc_url) as client:
        for i in (0, 17, 63):
            assert results[i].item_ids.tolist() == client.retrieve([1000 + i], num_results=2).item_ids.tolist()


@pytest.mark.case("L03")
def test_server_away_then_back_needs_no_new_client(served, kind):
    make, protocol = kind
    relay = Relay(address(served, protocol))
    with make(f"127.0.0.1:{relay.port}", protocol, timeout=2.0) as client:
        started = time.perf_counter()
        with pytest.raises(UnavailableError, match=str(relay.port)):
            client.retrieve([1003])
        assert time.perf_counter() - started < 20, "a refused connection was tried again and again"
        relay.open()
        try:
            first = client.retrieve([1003], timeout=5.0)
            relay.shut()
            with pytest.raises((UnavailableError, DeadlineError)):
                client.retrieve([1003])
            relay.open()
            assert same(client.retrieve([1003], timeout=5.0), first)
        finally:
            relay.shut()


class FakeServer(BaseHTTPRequestHandler):
    """Says what a test wants a server to say."""

    protocol_version = "HTTP/1.1"
    answers: ClassVar[list[tuple[int, bytes]]] = []
    asked = 0

    def do_GET(self) -> None:
        config = {"name": "m", "max_batch_size": 4, "input": [{"name": "history", "data_type": "TYPE_INT64"}]}
        self._say(200, json.dumps(config).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        FakeServer.asked += 1
        self._say(*FakeServer.answers[min(FakeServer.asked, len(FakeServer.answers)) - 1])

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def fake():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    FakeServer.asked = 0
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "error", "asked"),
    [
        (503, b'{"error":"queue full"}', UnavailableError, 3),
        (502, b"<html>bad gateway</html>", UnavailableError, 3),
        (500, b'{"error":"boom"}', ServerError, 1),
        (400, b'{"error":"no"}', InvalidRequestError, 1),
        (504, b"", DeadlineError, 1),
        (418, b'{"unexpected": 1}', ServerError, 1),
    ],
)
def test_only_unavailable_is_repeated_and_every_status_has_its_error(fake, status, body, error, asked):
    FakeServer.answers = [(status, body)]
    with Client(fake, "http", retries=2) as client, pytest.raises(error) as caught:
        client.retrieve([1])
    assert FakeServer.asked == asked
    assert fake in str(caught.value)


def test_pauses_between_retries_stay_within_the_deadline(fake):
    FakeServer.answers = [(503, b'{"error":"queue full"}')]
    started = time.perf_counter()
    with Client(fake, "http", retries=50) as client, pytest.raises(UnavailableError, match="queue full"):
        client.retrieve([1], timeout=0.5)
    assert time.perf_counter() - started < 10  # fifty pauses would be more


def test_importing_the_client_needs_nothing_of_the_server_the_builder_or_an_event_loop():
    code = (
        "import sys, trieton_client\n"
        "heavy = {'torch', 'onnxruntime', 'numba', 'trieton', 'trieton_builder', 'transformers', 'polars', 'aiohttp'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_wrong_options_are_refused_when_the_client_is_made(tmp_path):
    for options, text in [
        ({"protocol": "rest"}, "protocol: expected 'grpc' or 'http', got 'rest'"),
        ({"url": "ftp://x"}, "url: expected host:port"),
        ({"url": ""}, "url: expected host:port"),
        *(
            ({"timeout": bad}, "timeout: expected more than 0")
            for bad in (0, -1, "5", True, float("nan"), float("inf"))
        ),
        *(({"retries": bad}, "retries: expected an integer of at least 0") for bad in (-1, 1.5, True, None)),
        ({"pool_size": 0}, "pool_size: expected an integer of at least 1"),
        ({"model": ""}, "model: expected a name"),
        ({"tls": "yes"}, "tls: expected"),
        ({"headers": ["a"]}, "headers: expected a dict"),
        ({"headers": {"a b": "c"}}, "headers: expected names"),
        ({"headers": {"a": "b\r\nc: d"}}, "headers: a: expected printable"),
        ({"headers": {"a": "\xfc"}}, "headers: a: expected printable"),
    ]:
        for make in (Client, AsyncClient):
            with pytest.raises(ValueError, match=text):
                make(**{"url": "localhost:8001", **options})
    with pytest.raises(ValueError, match="cert and key belong together"):
        Tls(cert=tmp_path / "a")
    with pytest.raises(ValueError, match="ca: no such file"):
        Tls(ca=tmp_path / "a")
    with Client("localhost:8001") as client, pytest.raises(ValueError, match="timeout: expected more than 0"):
        client.retrieve([1], timeout=-1)
    with Client("localhost:8001") as client, pytest.raises(TypeError, match="num_result"):
        client.retrieve([1], num_result=3)  # type: ignore[call-arg]
