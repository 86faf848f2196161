"""Whether gRPC calls of one gevent process really run beside each other.

gRPC's own threads know nothing of greenlets: without `grpc.experimental.gevent.init_gevent()` before the first channel
one call blocks every user of the process, and the load test then measures itself (four calls of 0.5 s take 2.0 s).
"""

import time

import gevent
import grpc
from gevent import socket

CALLS = 4
SECONDS = 0.5


class NoOverlapError(RuntimeError):
    """gRPC calls block each other in this process."""


def measure_overlap(calls: int = CALLS, seconds: float = SECONDS) -> float:
    """Seconds that `calls` simultaneous gRPC calls of `seconds` each take together.

    No server is needed for a slow call: the calls go to a listener on loopback that accepts and never answers, so each
    ends by its own deadline.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[object] = []
        acceptor = gevent.spawn(lambda: held.extend(listener.accept() for _ in range(calls)))
        with grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            call = channel.unary_unary("/trieton/Overlap", request_serializer=bytes, response_deserializer=bytes)

            def ask() -> None:
                try:
                    call(b"", timeout=seconds, wait_for_ready=True)
                except grpc.RpcError as error:
                    if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                        raise

            start = time.perf_counter()
            gevent.joinall([gevent.spawn(ask) for _ in range(calls)], raise_error=True)
            elapsed = time.perf_counter() - start
        acceptor.kill()
    return elapsed


def check_overlap() -> float:
    """`measure_overlap()`, refused when the calls ran one after another.

    Raises:
        NoOverlapError: says what to do.
    """
    elapsed = measure_overlap()
    if elapsed > 1.5 * SECONDS:  # 1.0 is perfect, CALLS is one after another
        raise NoOverlapError(
            f"{CALLS} gRPC calls of {SECONDS} s took {elapsed:.2f} s together: they block each other; "
            "call grpc.experimental.gevent.init_gevent() before the first channel"
        )
    return elapsed


if __name__ == "__main__":
    import sys

    from gevent import monkey

    monkey.patch_all()
    if "--without-init" not in sys.argv:
        import grpc.experimental.gevent

        grpc.experimental.gevent.init_gevent()
    print(f"{measure_overlap():.3f}")
