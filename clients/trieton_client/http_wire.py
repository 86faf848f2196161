"""HTTP for `Client`: tritonclient's message format over the standard library's connections."""

import contextlib
import http.client
import json
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from tritonclient.utils import InferenceServerException

from trieton_client.errors import NOT_JSON, ClientError, DeadlineError, UnavailableError, error_from
from trieton_client.options import Options
from trieton_client.results import Results
from trieton_client.wire import Chunk, ModelFacts, count_answers, read_description, read_results


class HttpWire:
    """A pool of connections that bound every single call; a search changes nothing, so it may be sent again.

    A pool of its own, because a general HTTP client costs more per call than all the rest of this package.
    """

    def __init__(self, options: Options):
        import tritonclient.http  # brings an HTTP library of its own, which programs that speak gRPC need not load

        self.triton = tritonclient.http
        self.options = options
        self.pool_size = options.pool_size
        self.idle: deque[http.client.HTTPConnection] = deque()  # its appends and pops are safe between threads
        self.busy: set[http.client.HTTPConnection] = set()
        self.closed = False
        self._closing = threading.Lock()
        self.host, _, prefix = options.address.target.partition("/")
        self.base = f"/{prefix}".rstrip("/") + f"/v2/models/{quote(options.model, safe='')}"
        self.context = options.tls.context() if options.tls else None

    def facts(self, timeout: float) -> ModelFacts:
        return ModelFacts.from_config(self._asked("/config", timeout))

    def answered(self, timeout: float) -> dict[str, int]:
        return count_answers(self._asked("/stats", timeout))

    def describe(self, request: Chunk, timeout: float) -> dict[str, Any]:
        return read_description(self._infer(request, timeout, self.options.headers), self.options.where)

    def infer(self, chunk: Chunk, timeout: float, *, headers: dict[str, str]) -> Sequence[Results | ClientError]:
        response = self._infer(chunk, timeout, headers)
        return read_results(response, chunk.rows, response.get_response()["model_version"])

    def _infer(self, chunk: Chunk, timeout: float, headers: dict[str, str]) -> Any:
        body, header_length = self.triton.InferenceServerClient.generate_request_body(
            chunk.inputs(self.triton), parameters=chunk.parameters
        )
        headers = {**headers, "Inference-Header-Content-Length": str(header_length)}
        answer, answer_header_length = self._send("POST", "/infer", body, headers, timeout)
        try:
            return self.triton.InferenceServerClient.parse_response_body(answer, header_length=answer_header_length)
        except ValueError:  # of whichever parser tritonclient has
            raise UnavailableError(NOT_JSON, where=self.options.where) from None

    def _asked(self, path: str, timeout: float) -> dict:
        answer, _ = self._send("GET", path, None, self.options.headers, timeout)
        try:
            return dict(json.loads(answer))
        except ValueError:
            raise UnavailableError(NOT_JSON, where=self.options.where) from None

    def _send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float
    ) -> tuple[bytes, str | None]:
        """The body of the answer, and how much of it is JSON."""
        where = self.options.where
        end = time.monotonic() + timeout
        connection = self._connection()
        self.busy.add(connection)
        what = "no connection"
        try:
            sock = connection.sock = connection.sock or self._connect(end)
            what = "no answer"
            sock.settimeout(_left(end))
            connection.request(method, self.base + path, body, headers)
            sock.settimeout(_left(end))
            response = connection.getresponse()
            answer = _read(response, sock, end)
        except TimeoutError:
            connection.close()
            self._drop_idle()  # what has gone silent for one connection has gone silent for those beside it
            raise DeadlineError(f"{what} within {timeout:.3g} s", where=where) from None
        except socket.gaierror as failure:
            connection.close()
            raise UnavailableError(
                f"the name {connection.host} is not known ({failure.strerror})", where=where
            ) from None
        except (http.client.HTTPException, OSError) as failure:
            connection.close()
            reason = str(failure) or type(failure).__name__
            text = "the answer is not HTTP" if isinstance(failure, http.client.BadStatusLine) else reason
            raise UnavailableError(f"cannot reach the server ({text})", where=where) from None
        except BaseException:
            connection.close()  # half an answer may still be in it
            raise
        finally:
            self.busy.discard(connection)
        self._keep(connection)
        if response.status != 200:
            raise error_from(InferenceServerException(_reason(answer), status=str(response.status)), where)
        return answer, response.headers.get("Inference-Header-Content-Length")

    def _connection(self) -> http.client.HTTPConnection:
        """An idle connection that the server has not closed meanwhile, or a new one."""
        while self.idle:
            try:
                connection = self.idle.pop()
            except IndexError:  # another thread was quicker
                break
            if connection.sock is not None and not _is_readable(connection.sock):
                return connection
            connection.close()
        return http.client.HTTPConnection(self.host)

    def _connect(self, end: float) -> socket.socket:
        """A connection to the first address that takes one; each of those that are left gets its share of the time."""
        host, port = self.options.address.places[0]
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for place, (family, kind, number, _, address) in enumerate(found):
            sock = socket.socket(family, kind, number)
            try:
                sock.settimeout(_left(end) / (len(found) - place))
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock if self.context is None else self.context.wrap_socket(sock, server_hostname=host)
            except OSError:
                sock.close()
                if place == len(found) - 1:
                    raise
        raise AssertionError("unreachable: a name has an address, or is an error")

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._closing:
            if not self.closed and len(self.idle) < self.pool_size:
                self.idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        while self.idle:
            with contextlib.suppress(IndexError):
                self.idle.pop().close()

    def close(self) -> None:
        with self._closing:
            self.closed = True
        self._drop_idle()
        for connection in list(self.busy):
            if connection.sock is not None:  # shut down, not closed: the thread that reads from it wakes up
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)


def _left(end: float) -> float:
    """Seconds until `end`. Raises TimeoutError when there are none."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _read(response: http.client.HTTPResponse, sock: socket.socket, end: float) -> bytes:
    """The body; the time is for all of it, not for each piece, as the socket's own timeout would be."""
    pieces = []
    while response.length != 0:
        sock.settimeout(_left(end))
        piece = response.read1(1 << 20)
        if not piece:
            break
        pieces.append(piece)
    if response.length:  # None where the length was not told beforehand
        raise http.client.IncompleteRead(b"".join(pieces), response.length)
    response.close()
    return b"".join(pieces)


def _is_readable(connection: socket.socket) -> bool:
    """Whether something has arrived; on an idle connection that can only be the news of its end."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))


def _reason(body: bytes) -> str:
    """The text of an error response; a proxy in between may answer with something that is not JSON."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
