"""Networks as they are: proxies in the environment, several servers behind one name, connections that go silent."""

import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trieton_client.channel
from network import Relay, TinyServer
from rollout_help import command_here
from test_client import Blocking, address
from trieton_builder.rollout import control as rollout_control
from trieton_builder.rollout.control import ServerControl
from trieton_builder.rollout.errors import RolloutError
from trieton_builder.rollout.repository import Repository
from trieton_builder.server.doctor import examine
from trieton_builder.server.process import PING_MS
from trieton_client import Client, ClientError, DeadlineError, UnavailableError
from trieton_client.address import NO_PROXY_VARIABLES, PROXY_VARIABLES, Address

pytestmark = pytest.mark.server
KINDS: list[tuple[Any, str]] = [(Client, "grpc"), (Client, "http"), (Blocking, "grpc"), (Blocking, "http")]
every_kind = pytest.mark.parametrize(("make", "protocol"), KINDS, ids=["grpc", "http", "aio-grpc", "aio-http"])
DEAD = "http://user:secret@127.0.0.1:9"


def eventually(holds: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not (true := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true


# ---- proxies


@pytest.fixture
def proxied(monkeypatch):
    """Every variable names a proxy that does not answer, and nothing is left out."""
    for name in (*PROXY_VARIABLES, "all_proxy"):
        monkeypatch.setenv(name, DEAD)
        monkeypatch.setenv(name.upper(), DEAD)
    for name in NO_PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.case("W30")
@every_kind
def test_this_machine_is_reached_without_the_proxy_of_the_environment(served, proxied, make, protocol):
    url = address(served, protocol)
    with make(url, protocol) as client, make(url.replace("127.0.0.1", "localhost"), protocol) as named:
        assert client.retrieve([1003]).item_ids.tolist() == named.retrieve([1003]).item_ids.tolist()


@pytest.mark.case("W30")
def test_commands_and_publisher_reach_this_machine_without_the_proxy(served, proxied, tmp_path):
    for words in (["query", 1003, "--url"], ["probe", "--url"], ["probe", "--live", "--url"], ["describe"]):
        done = command_here(*words, served.grpc_url)
        assert done.returncode == 0, done.stderr
    control = ServerControl(served.grpc_url, Repository(tmp_path), key=served.control_key)
    assert control.ready_versions() == [1]
    control.close()


@pytest.mark.case("W30")
def test_an_error_names_the_variable_of_the_proxy_and_not_its_password(proxied, monkeypatch, tmp_path):
    control = ServerControl("192.0.2.1:8001", Repository(tmp_path))
    for error, call in ((UnavailableError, Client("192.0.2.1:8001").facts), (RolloutError, control.states)):
        with pytest.raises(error) as caught:
            call()
        for word in ("grpc_proxy", "127.0.0.1:9", "no_proxy=192.0.2.1"):
            assert word in str(caught.value)
        assert "secret" not in str(caught.value)
    control.close()
    found = {finding.check: finding for finding in examine(start=False)}["proxy"]
    assert found.status == "note"
    assert "grpc_proxy=127.0.0.1:9" in found.text
    assert "secret" not in found.text
    monkeypatch.setenv("grpc_proxy", "")  # gRPC takes the first variable that is set, and an empty one for none
    assert Address.parse("192.0.2.1:8001").proxy() is None


@pytest.mark.case("W30")
def test_other_machines_are_reached_through_the_proxy_unless_they_are_left_out(served, proxied, monkeypatch):
    with Relay(served.grpc_url, proxy=True) as relay:
        monkeypatch.setenv("grpc_proxy", f"http://{relay.url}")
        with Client("retriever.invalid:8001") as client:
            assert len(client.retrieve([1003])) == 10
        assert relay.connects == ["retriever.invalid:8001"]
        monkeypatch.setenv("no_proxy", "10.0.0.0/8,.invalid")
        with Client("retriever.invalid:8001", retries=0) as client, pytest.raises(UnavailableError) as caught:
            client.retrieve([1003])
        assert len(relay.connects) == 1
        assert "retriever.invalid" in caught.value.reason
        assert "proxy" not in caught.value.reason


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("10.1.2.3:1", None),  # in a network that no_proxy names
        ("11.1.2.3:1", "https_proxy"),
        ("a.example:1", None),
        ("dns:///b.other:1", "https_proxy"),
        ("[::1]:1", None),
        ("dns:localhost:1", None),
        ("ipv4:11.1.2.3:1,11.1.2.4:1", None),  # no proxy understands a list
        ("unix:/tmp/socket", None),
    ],
)
def test_which_addresses_go_through_a_proxy(monkeypatch, url, variable):
    for name in (*PROXY_VARIABLES, *NO_PROXY_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8, .example")
    proxy = Address.parse(url).proxy()
    assert proxy == (None if variable is None else (variable, "proxy:3128"))


# ---- several servers


@pytest.fixture
def pair():
    """Two servers on two addresses of this machine, on one port."""
    for _ in range(20):
        with TinyServer("127.0.0.1") as first:
            try:
                second = TinyServer("127.0.0.2", first.port)
            except RuntimeError:  # somebody has this port there
                continue
            with second:
                yield first, second
                return
    pytest.fail("no port is free on both addresses")


@pytest.mark.case("W31")
@pytest.mark.parametrize("make", [Client, Blocking])
def test_calls_are_spread_over_all_servers_and_go_on_when_one_ends(pair, make):
    first, second = pair
    with make(f"ipv4:127.0.0.1:{first.port},127.0.0.2:{first.port}") as client:

        def both() -> bool:
            client.retrieve([1])
            return first.searches > 0 < second.searches

        assert eventually(both)
        first.searches = second.searches = 0
        for _ in range(20):
            assert client.retrieve([1]).item_ids.tolist() == [7]
        assert (first.searches, second.searches) == (10, 10)
        second.server.stop(None).wait()
        for _ in range(6):
            client.retrieve([1])


@pytest.mark.case("W31")
@pytest.mark.parametrize("form", ["dns:///localhost:{}", "dns:localhost:{}", "localhost:{}", "ipv4:127.0.0.1:{}",
                                  "grpc://127.0.0.1:{}/", "http://127.0.0.1:{}"])  # fmt: skip
def test_every_form_of_an_address_is_accepted(form):
    with TinyServer() as server, Client(form.format(server.port)) as client, Blocking(form.format(server.port)) as aio:
        assert client.retrieve([1]).bundle_id == aio.retrieve([1]).bundle_id == "tiny"
        assert command_here("query", 1, "--url", form.format(server.port)).returncode == 0


def test_addresses_of_ipv6(served):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = TinyServer("[::1]")
    except RuntimeError:
        pytest.skip("no IPv6 loopback here")
    with server:
        for url in (f"[::1]:{server.port}", f"ipv6:[::1]:{server.port}", f"dns:///[::1]:{server.port}"):
            with Client(url) as client:
                assert len(client.retrieve([1])) == 1


@pytest.mark.parametrize(
    ("url", "protocol", "words"),
    [
        ("", "grpc", "host:port"),
        ("localhost", "grpc", "without a port"),
        ("local host:1", "grpc", "host:port"),
        ("localhost:1\n", "grpc", "host:port"),
        (b"localhost:1", "grpc", "bytes"),
        (None, "http", "NoneType"),
        ("localhost:0", "http", "1 to 65535"),
        ("localhost:65536", "grpc", "65536"),
        ("localhost:a", "http", "host:port"),
        ("::1:8001", "grpc", "brackets"),
        ("[::1]", "grpc", "without a port"),
        ("user:word@host:1", "http", "headers"),
        ("localhost:1/path", "grpc", "no paths"),
        ("localhost:1?a=b", "http", "host:port"),
        ("ftp://x:1", "grpc", "scheme"),
        ("://x:1", "grpc", "scheme"),
        ("grpc://x:1", "http", "HTTP"),
        ("dns:///x:1", "http", "of gRPC"),
        ("dns:///x", "grpc", "without a port"),
        ("ipv4:x:1", "grpc", "'x'"),
        ("ipv4:127.0.0.1:1,[::1]:1", "grpc", "'::1'"),
        ("ipv4:127.0.0.1:1,,", "grpc", "host:port"),
    ],
)
def test_an_address_that_cannot_be_right_is_refused(url, protocol, words):
    for make in (Client, Blocking):
        with pytest.raises(ValueError, match=r"^url: ") as caught:
            make(url, protocol)
        assert words in str(caught.value)
        assert "word@" not in str(caught.value), "a password must not be shown"


def test_what_the_libraries_get_of_an_address():
    for url, protocol, target, secure in [
        ("http://a/", "http", "a:80", False),
        ("https://a", "grpc", "a:443", True),
        ("https://a:1/triton/", "http", "a:1/triton", True),
        ("grpcs://[::1]:2", "grpc", "[::1]:2", True),
        ("dns:8001", "http", "dns:8001", False),  # a host with this name
        ("dns://8.8.8.8/a:1", "grpc", "dns://8.8.8.8/a:1", False),
    ]:
        found = Address.parse(url, protocol)
        assert (found.target, found.secure) == (target, secure)


# ---- silence


@pytest.mark.case("W32")
@every_kind
def test_a_connection_that_went_silent_costs_one_call(served, make, protocol):
    with Relay(address(served, protocol)) as relay, make(relay.url, protocol, timeout=10) as client:
        first = client.retrieve([1003])
        relay.silence()
        with pytest.raises(DeadlineError):
            client.retrieve([1003], timeout=1)
        assert client.retrieve([1003]).item_ids.tolist() == first.item_ids.tolist()
        assert client.retrieve([1003]).item_ids.tolist() == first.item_ids.tolist()


@pytest.mark.case("W32")
def test_all_idle_connections_of_the_pool_are_given_up_when_one_is_silent(served):
    with Relay(served.http_url) as relay, Client(relay.url, "http") as client, ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda _: client.retrieve([1003]), range(24)))
        assert len(client._wire.idle) > 1
        relay.silence()
        with pytest.raises(DeadlineError):
            client.retrieve([1003], timeout=1)
        client.retrieve([1003])


@pytest.mark.case("W32")
@pytest.mark.parametrize("make", [Client, Blocking])
def test_a_server_that_is_only_slow_keeps_its_connection(make):
    with TinyServer() as server, Relay(f"127.0.0.1:{server.port}") as relay, make(relay.url) as client:
        client.retrieve([1])
        server.goes_on.clear()
        before = len(relay.connections)
        with ThreadPoolExecutor(1) as threads:
            if make is Client:  # answers come in while one call waits in vain
                waiting = threads.submit(client.retrieve, [1], timeout=1.5)
                while not waiting.done():
                    client.facts()
                    client._facts = None
                    time.sleep(0.05)
                assert isinstance(waiting.exception(), DeadlineError)
                assert len(relay.connections) == before
            else:
                # Nothing came: one new connection, and no more while that one is young.
                for _ in range(3):
                    with pytest.raises(DeadlineError):
                        client.retrieve([1], timeout=0.3)
                assert len(relay.connections) <= before + 2


@pytest.mark.case("W32")
def test_the_publisher_goes_on_over_connections_that_went_silent(served, tmp_path, monkeypatch):
    quick = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 1000, "grpc.http2.ping_timeout_ms": 1000}
    options = [(name, quick.get(name, value)) for name, value in trieton_client.channel.GRPC_OPTIONS]
    monkeypatch.setattr(rollout_control, "QUICK", 1.5)
    with Relay(served.grpc_url) as relay:
        control = ServerControl(relay.url, Repository(tmp_path), key=served.control_key)
        assert control.ready_versions() == [1]
        relay.silence()
        assert control.ready_versions() == [1], "a question is asked again when its time has passed"
        control.close()
        monkeypatch.setattr(trieton_client.channel, "GRPC_OPTIONS", options)
        control = ServerControl(relay.url, Repository(tmp_path), key=served.control_key, load_timeout=100)
        assert control.ready_versions() == [1]
        relay.silence()
        started = time.monotonic()
        control.load_other("text_retriever")  # changes nothing; pings notice long before its time has passed
        assert time.monotonic() - started < 50
        assert control.states("text_retriever")[1][0] == "READY"
        control.close()


def test_pings_come_no_more_often_than_our_servers_allow():
    options = dict(trieton_client.channel.GRPC_OPTIONS)
    script = (Path(__file__).parents[1] / "deploy" / "serve.sh").read_text()
    assert options["grpc.keepalive_time_ms"] > PING_MS
    assert f"--grpc-http2-min-recv-ping-interval-without-data={PING_MS}" in script
    assert "grpc.http2.max_pings_without_data" not in options, "others take two pings per answer, gRPC's default"
    assert "grpc.keepalive_permit_without_calls" not in options, "idle connections are left alone"


# ---- wrong ports, and servers that come and go


@pytest.mark.case("W54")
@every_kind
def test_the_wrong_port_is_named(served, make, protocol):
    wrong, says = (served.http_url, "not gRPC") if protocol == "grpc" else (served.grpc_url, "not HTTP")
    usual = "8001" if protocol == "grpc" else "8000"
    for url in (wrong, served.metrics_url.split("/")[2]):
        with make(url, protocol, retries=1) as client, pytest.raises(UnavailableError) as caught:
            client.retrieve([1003])
        assert usual in caught.value.reason, caught.value.reason
        assert caught.value.reason.isprintable()
        if url == wrong:
            assert says in caught.value.reason


@pytest.mark.case("W54")
@every_kind
def test_tls_to_a_plain_port_is_named(served, make, protocol):
    url = address(served, protocol)
    with make(url, protocol, tls=True, retries=0) as client, pytest.raises(UnavailableError, match="without TLS"):
        client.retrieve([1003])


@every_kind
def test_a_name_that_nobody_knows_is_named(make, protocol):
    with make("nowhere.invalid:8001", protocol, retries=0) as client, pytest.raises(UnavailableError) as caught:
        client.retrieve([1003])
    assert "nowhere.invalid" in caught.value.reason or protocol == "http"
    assert "nowhere.invalid" in str(caught.value)


@every_kind
def test_a_server_that_takes_the_connection_and_says_nothing(make, protocol):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"127.0.0.1:{mute.getsockname()[1]}"
        started = time.monotonic()
        with make(url, protocol) as client, pytest.raises(DeadlineError):
            client.retrieve([1003], timeout=0.5)
        assert time.monotonic() - started < 5


class Impolite(BaseHTTPRequestHandler):
    """Closes the connection after every answer without saying so, as a server that ends does."""

    protocol_version = "HTTP/1.1"
    trickle = 0.0

    def do_GET(self) -> None:
        body = json.dumps({"name": "m", "max_batch_size": 4, "input": [{"name": "history", "data_type": "TYPE_INT64"}]})
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        for letter in body:
            self.wfile.write(letter.encode())
            if self.trickle:
                self.wfile.flush()
                time.sleep(self.trickle)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def impolite():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Impolite)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    Impolite.trickle = 0.0
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("make", [Client, Blocking])
def test_connections_that_the_server_closed_between_calls_cost_nothing(impolite, make):
    with make(impolite, "http", retries=1) as client:
        for _ in range(10):
            assert client.facts().max_batch_size == 4
            (client if make is Client else client.client)._facts = None
            time.sleep(0.01)


@pytest.mark.parametrize("make", [Client, Blocking])
def test_an_answer_in_drops_ends_at_the_deadline(impolite, make):
    Impolite.trickle = 0.1  # more than ten seconds for all of it
    started = time.monotonic()
    with make(impolite, "http", timeout=0.5) as client, pytest.raises(DeadlineError, match="no answer"):
        client.facts()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("make", [Client, Blocking])
def test_a_server_started_anew_on_its_port_is_found_by_the_next_calls(make):
    with TinyServer() as first, make(f"127.0.0.1:{first.port}", timeout=10) as client:
        client.retrieve([1])
        first.server.stop(None).wait()
        with TinyServer(port=first.port) as second:
            assert second.port == first.port
            client.retrieve([1])
            assert second.searches == 1


# ---- the end of a client


@every_kind
def test_a_closed_client_says_so(served, make, protocol):
    client = make(address(served, protocol), protocol)
    client.retrieve([1003])
    client.close()
    client.close()
    with pytest.raises(ClientError, match="closed"):
        client.retrieve([1003])


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_call_that_runs_while_the_client_is_closed_fails_at_once(served, protocol):
    client = Client(address(served, protocol), protocol, model="slow_retriever", timeout=60)
    client.facts()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.retrieve, [[1000 + n] for n in range(32)], beam_width=256)
        time.sleep(0.1)
        assert not call.done()
        client.close()
        assert isinstance(call.exception(timeout=10), ClientError)
    assert "closed" in str(call.exception())


def _in_child(client: Client, pipe: Any) -> None:
    try:
        pipe.send(str(client.retrieve([1003]).bundle_id))
    except ClientError as error:
        pipe.send(str(error))
    finally:
        pipe.close()
        os._exit(0)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_client_that_was_used_before_a_fork_says_so_in_the_child(served, protocol):
    with Client(address(served, protocol), protocol) as client:
        client.retrieve([1003])
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_in_child, args=(client, theirs))
        child.start()
        assert ours.poll(30)
        assert f"process {os.getpid()}" in ours.recv()
        child.join(10)
        assert len(client.retrieve([1003])) == 10


def test_an_async_client_of_another_event_loop_says_so(served):
    client = Blocking(served.grpc_url)
    client.retrieve([1003])
    with Blocking(served.grpc_url) as other, pytest.raises(ClientError, match="event loop"):
        other.loop.run_until_complete(client.client.retrieve([1003]))
    client.close()
