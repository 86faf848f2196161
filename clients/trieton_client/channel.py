"""Connections over gRPC: how they are configured, and when a new one takes the place of one that went silent."""

import threading
import time
from collections.abc import Callable
from typing import Any

from trieton_client.address import Address

YOUNG = 5.0  # seconds in which a connection that has not said anything yet may still be on its way
GRPC_OPTIONS: list[tuple[str, Any]] = [
    # gRPC itself waits up to two minutes before it tries a server again that was away; this is within our own retries.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.min_reconnect_backoff_ms", 5000),  # which is the time that one attempt to connect may take
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A name may have many addresses, for example the pods of a headless service: all of them get calls in turn.
    ("grpc.lb_policy_name", "round_robin"),
    # Channels with equal options share their connections by default, so a new channel would get the silent one.
    ("grpc.use_local_subchannel_pool", 1),
    # While calls wait, ask every 10 s whether the other end is there, and take 5 s without an answer for a no. gRPC
    # waits for the longer of both timeouts. `max_pings_without_data` stays at its default of 2: the server ends
    # connections that send more than two pings before it has sent anything (too_many_pings).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
]


def channel_options(address: Address) -> list[tuple[str, Any]]:
    """Options of a channel to `address`: to this machine, and to lists of addresses, gRPC goes without a proxy."""
    return [*GRPC_OPTIONS, ("grpc.enable_http_proxy", 0)] if address.direct else GRPC_OPTIONS


class Line:
    """One open client of tritonclient and what is known of it.

    Attributes:
        heard: when it last brought an answer (monotonic seconds); None before the first.
        users: calls that run on it.
    """

    def __init__(self, client: Any):
        self.client = client
        self.opened = time.monotonic()
        self.heard: float | None = None
        self.users = 0


class Lines:
    """The connection that calls share, opened at the first call, and a new one once it has gone silent.

    A relay or a firewall may forget a connection without telling either end. Whoever sends on it waits for ever, and a
    deadline that passes is the only sign. If nothing at all has come since the call was sent, the next call gets a new
    connection; calls that still wait on the old one keep it until they end.

    The methods return clients that nobody uses any more: the caller closes them, as its kind of client needs it.
    """

    def __init__(self, open_client: Callable[[], Any]):
        self._open = open_client
        self._lock = threading.Lock()
        self._current: Line | None = None
        self._old: set[Line] = set()
        self.closed = False

    def take(self) -> Line:
        """The connection for one call; `give` it back."""
        with self._lock:
            if self._current is None:
                self._current = Line(self._open())
            self._current.users += 1
            return self._current

    def give(self, line: Line) -> list[Any]:
        """End of a call."""
        with self._lock:
            line.users -= 1
            if line.users or line not in self._old:
                return []
            self._old.discard(line)
            return [line.client]

    def silent(self, line: Line, since: float) -> None:
        """A call that was sent at `since` (monotonic seconds) got no answer in its time."""
        with self._lock:
            if line is not self._current:
                return
            now = time.monotonic()
            if now - line.opened >= YOUNG if line.heard is None else line.heard < since:
                self._current = None
                self._old.add(line)

    def close(self) -> list[Any]:
        """No more calls; those that run fail once their client is closed."""
        with self._lock:
            self.closed = True
            clients = [line.client for line in self._old]
            if self._current is not None:
                clients.append(self._current.client)
            self._current = None
            self._old.clear()
            return clients
