"""The client for programs without an event loop."""

import contextlib
import http.client
import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, overload

import tritonclient.grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from trieton_client.errors import DeadlineError, UnavailableError, error_from
from trieton_client.options import MODEL, Deadline, Options, Tls
from trieton_client.results import Results
from trieton_client.wire import Call, Chunk, Ids, ModelFacts, read_results

Answer = TypeVar("Answer")
# gRPC itself waits up to two minutes before it tries a server again that was away; this is within our own retries.
GRPC_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.min_reconnect_backoff_ms", 5000),  # which is the time that one attempt to connect may take
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]


class Client:
    """Asks one server; may be shared by any number of threads.

    Args:
        url: host:port of the server's gRPC or HTTP endpoint.
        protocol: "grpc" or "http".
        model: name of the served model.
        timeout: default deadline of a call in seconds, over all its chunks and retries.
        retries: how often a request is repeated, with growing pauses, when the server is away, busy or between
            versions. That is safe because a search changes nothing on the server. Nothing else is repeated: a request
            that failed or ran out of time would only do so again.
        tls: keys for an encrypted connection, or True for the system's; taken from an https:// or grpcs:// url.
        headers: sent with every request, e.g. {"authorization": "Bearer ..."}.

    Threads: gRPC calls of all threads share one connection. Over HTTP each call takes a connection from a pool, which
    keeps up to `pool_size` of them open (tritonclient's own HTTP client must not be shared, so only its message format
    is used). Under gevent (as in Locust) call `grpc.experimental.gevent.init_gevent()` before the first gRPC client is
    made; without it one call blocks all greenlets. Not usable across fork(): make the client in the child.
    """

    def __init__(
        self,
        url: str,
        protocol: str = "grpc",
        *,
        model: str = MODEL,
        timeout: float = 10.0,
        retries: int = 3,
        tls: Tls | bool | None = None,
        headers: dict[str, str] | None = None,
        pool_size: int = 16,
    ):
        self._options = Options.checked(
            url, protocol, model=model, timeout=timeout, retries=retries, tls=tls, headers=headers
        )
        self._wire: _Wire = _Grpc(self._options) if protocol == "grpc" else _Http(self._options, pool_size)
        self._facts: ModelFacts | None = None

    @overload
    def retrieve(
        self,
        history: "Ids | None" = None,
        num_results: int = 10,
        *,
        constraint: str | None = None,
        include: Any = None,
        exclude: Any = None,
        beam_width: int | None = None,
        input_ids: Any = None,
        timeout: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> Results: ...

    @overload
    def retrieve(
        self,
        history: "list[Ids] | None" = None,
        num_results: int = 10,
        *,
        constraint: str | None = None,
        include: Any = None,
        exclude: Any = None,
        beam_width: int | None = None,
        input_ids: Any = None,
        timeout: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> list[Results]: ...

    def retrieve(
        self,
        history: Any = None,
        num_results: int = 10,
        *,
        constraint: str | None = None,
        include: Any = None,
        exclude: Any = None,
        beam_width: int | None = None,
        input_ids: Any = None,
        timeout: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """The best items for one history, or for each of a list of histories.

        Args:
            history: item ids (int or str, as the catalogue has them), oldest first; or a list of such histories, sent
                in requests of at most the model's batch size.
            num_results: items wanted per history.
            constraint: expression over the version's named sets, e.g. "fresh and not adult".
            include: only these items may be returned: one list, or one per history.
            exclude: these items are never returned: one list, or one per history.
            beam_width: prefixes that survive each level; the server's default when None.
            input_ids: raw prompt tokens instead of `history`, in the same two forms.
            timeout: deadline in seconds; the client's default when None.
            headers: of this call, beside those of the client, e.g. {"traceparent": ...}.

        Returns:
            Results, or a list of Results in the order of the histories.

        Raises:
            InvalidRequestError: something about the request, with the server's reason.
            NotFoundError, UnavailableError, DeadlineError, ServerError: see `trieton_client.errors`.
        """
        call = Call.checked(
            history,
            input_ids=input_ids,
            num_results=num_results,
            beam_width=beam_width,
            constraint=constraint,
            include=include,
            exclude=exclude,
        )
        deadline = Deadline(self._options.timeout if timeout is None else timeout, self._options.where)
        facts = self._described(deadline)
        infer = partial(self._wire.infer, parameters=call.parameters, headers=self._options.headers | (headers or {}))
        results: list[Results] = []
        for chunk in call.chunks(facts):
            results += self._repeat(partial(infer, chunk), deadline)
        return results[0] if call.single else results

    def describe(self, timeout: float | None = None) -> ModelFacts:
        """What the server says about the model: its batch size, and whether item ids are strings.

        Raises:
            NotFoundError, UnavailableError, DeadlineError: as `retrieve`.
        """
        return self._described(Deadline(self._options.timeout if timeout is None else timeout, self._options.where))

    def _described(self, deadline: Deadline) -> ModelFacts:
        facts = self._facts  # read once: another thread may forget it meanwhile
        if facts is None:
            facts = self._facts = self._repeat(self._wire.facts, deadline)
        return facts

    def _repeat(self, ask: Callable[[float], Answer], deadline: Deadline) -> Answer:
        for attempt in range(self._options.retries + 1):
            try:
                return ask(deadline.remaining())
            except UnavailableError:
                self._facts = None  # whoever comes back may be configured differently
                pause = deadline.pause(attempt)
                if attempt == self._options.retries or pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close all connections; calls in flight fail."""
        self._wire.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Wire(Protocol):
    """One way to reach the server. Every error is a ClientError."""

    def facts(self, timeout: float) -> ModelFacts: ...

    def infer(self, chunk: Chunk, timeout: float, *, parameters: dict, headers: dict[str, str]) -> list[Results]: ...

    def close(self) -> None: ...


class _Grpc:
    def __init__(self, options: Options):
        self.options = options
        tls = options.tls.grpc() if options.tls else {}
        self.client = tritonclient.grpc.InferenceServerClient(options.url, channel_args=GRPC_OPTIONS, **tls)

    def facts(self, timeout: float) -> ModelFacts:
        try:
            config = self.client.get_model_config(
                self.options.model, headers=self.options.headers, client_timeout=timeout
            ).config
        except InferenceServerException as failure:
            raise error_from(failure, self.options.where) from None
        return ModelFacts.from_config(MessageToDict(config, preserving_proto_field_name=True))

    def infer(self, chunk: Chunk, timeout: float, *, parameters: dict, headers: dict[str, str]) -> list[Results]:
        try:
            response = self.client.infer(
                self.options.model,
                chunk.inputs(tritonclient.grpc),
                parameters=parameters,
                headers=headers,
                client_timeout=timeout,
            )
        except InferenceServerException as failure:
            raise error_from(failure, self.options.where) from None
        return read_results(response, chunk.rows, response.get_response().model_version)

    def close(self) -> None:
        self.client.close()


class _Http:
    """tritonclient's message format over the standard library's connections, which bound every single call.

    A pool of its own, because a general HTTP client costs more per call than all the rest of this package.
    """

    def __init__(self, options: Options, pool_size: int):
        import tritonclient.http  # brings an HTTP library of its own, which programs that speak gRPC need not load

        self.triton = tritonclient.http
        self.options = options
        self.pool_size = pool_size
        self.idle: deque[http.client.HTTPConnection] = deque()  # its appends and pops are safe between threads
        self.address, slash, prefix = options.url.partition("/")
        self.base = f"{slash}{prefix}/v2/models/{options.model}"
        self.context = options.tls.context() if options.tls else None

    def facts(self, timeout: float) -> ModelFacts:
        return ModelFacts.from_config(json.loads(self._send("GET", "/config", None, self.options.headers, timeout)[0]))

    def infer(self, chunk: Chunk, timeout: float, *, parameters: dict, headers: dict[str, str]) -> list[Results]:
        body, header_length = self.triton.InferenceServerClient.generate_request_body(
            chunk.inputs(self.triton), parameters=parameters
        )
        headers = {**headers, "Inference-Header-Content-Length": str(header_length)}
        answer, answer_header_length = self._send("POST", "/infer", body, headers, timeout)
        response = self.triton.InferenceServerClient.parse_response_body(answer, header_length=answer_header_length)
        return read_results(response, chunk.rows, response.get_response()["model_version"])

    def _send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float
    ) -> tuple[bytes, str | None]:
        """The body of the answer, and how much of it is JSON."""
        where = self.options.where
        connection = self._connection(timeout)
        try:
            connection.request(method, self.base + path, body, headers)
            response = connection.getresponse()
            answer = response.read()
        except TimeoutError:
            connection.close()
            raise DeadlineError(f"no answer within {timeout:.3g} s", where=where) from None
        except (http.client.HTTPException, OSError) as failure:
            connection.close()
            raise UnavailableError(f"cannot reach the server ({failure})", where=where) from None
        except BaseException:
            connection.close()  # half an answer may still be in it
            raise
        if len(self.idle) < self.pool_size:
            self.idle.append(connection)
        else:
            connection.close()
        if response.status != 200:
            raise error_from(InferenceServerException(_reason(answer), status=str(response.status)), where)
        return answer, response.headers.get("Inference-Header-Content-Length")

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        """An idle connection that the server has not closed meanwhile, or a new one."""
        while self.idle:
            try:
                connection = self.idle.pop()
            except IndexError:  # another thread was quicker
                break
            if connection.sock is not None and not _is_readable(connection.sock):
                connection.sock.settimeout(timeout)
                return connection
            connection.close()
        if self.context is None:
            return http.client.HTTPConnection(self.address, timeout=timeout)
        return http.client.HTTPSConnection(self.address, timeout=timeout, context=self.context)

    def close(self) -> None:
        while self.idle:
            with contextlib.suppress(IndexError):
                self.idle.pop().close()


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
