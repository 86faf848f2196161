"""The client for programs without an event loop."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import tritonclient.grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from trieton_client.channel import Lines, channel_options
from trieton_client.errors import ClientError, DeadlineError, UnavailableError, error_from
from trieton_client.options import Deadline, Options
from trieton_client.results import Results
from trieton_client.wire import (
    Call,
    Chunk,
    Ids,
    ModelFacts,
    count_answers,
    description_request,
    read_description,
    read_results,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from trieton_client.arguments import ClientArguments, RetrieveArguments

Answer = TypeVar("Answer")
CONCURRENT = 8  # requests of one call that are sent at the same time, where it needs several


class Client:
    """Asks one server, or all that one name stands for; may be shared by any number of threads.

    Args:
        url: host:port of the server's gRPC or HTTP endpoint, perhaps with a scheme http, https, grpc or grpcs. For gRPC
            also dns:///name:port, ipv4:a.b.c.d:port,e.f.g.h:port, ipv6:[...]:port or unix:/path; calls go to all
            addresses of a name or list in turn.
        protocol: "grpc" or "http".
        options: the others, see `trieton_client.arguments.ClientArguments`: model, timeout, retries, tls, headers and
            pool_size.

    Raises:
        ValueError: an option that cannot be right, by name.

    Threads: gRPC calls of all threads share one connection per server. Over HTTP each call takes a connection from a
    pool, which keeps up to `pool_size` of them open (tritonclient's own HTTP client must not be shared, so only its
    message format is used). Under gevent (as in Locust) call `grpc.experimental.gevent.init_gevent()` before the first
    gRPC client is used; without it one call blocks all greenlets. A client that has been used cannot be used in a
    forked child: it says so; make another one there.
    """

    def __init__(self, url: str, protocol: str = "grpc", **options: "Unpack[ClientArguments]"):
        self._options = Options.checked(url, protocol, **options)
        self._wire: _Wire | None = None
        self._process = 0  # in which the wire was made
        self._facts: ModelFacts | None = None
        self._met = False  # whether the server has ever answered
        self._closed = False

    @overload
    def retrieve(
        self, history: "Ids | None" = None, num_results: int = 10, **arguments: "Unpack[RetrieveArguments]"
    ) -> Results: ...

    @overload
    def retrieve(
        self, history: "Sequence[Ids] | None" = None, num_results: int = 10, **arguments: "Unpack[RetrieveArguments]"
    ) -> list[Results]: ...

    def retrieve(self, history: Any = None, num_results: int = 10, **arguments: "Unpack[RetrieveArguments]") -> Any:
        """The best items for one history, or for each of a list of histories.

        Args:
            history: item ids (int or str, as the catalogue has them), oldest first; or a list of such histories, sent
                in requests of at most the model's batch size.
            num_results: items wanted per history.
            arguments: the others, see `trieton_client.arguments.RetrieveArguments`: constraint, include, exclude,
                beam_width, strict, input_ids, timeout, headers and return_errors.

        Returns:
            Results, or a list of Results in the order of the histories.

        Raises:
            InvalidRequestError: something about the request, with the server's reason.
            NotFoundError, UnavailableError, DeadlineError, ServerError: see `trieton_client.errors`.
        """
        call = Call.checked(history, num_results, **arguments)
        deadline = self._deadline(call.timeout)
        groups = call.groups(self._known(deadline))

        def send(group: list[Chunk]) -> list[tuple[Chunk, Sequence[Results | ClientError]]]:
            return [(chunk, self._entries(chunk, call, deadline)) for chunk in group]

        if len(groups) == 1:
            return call.arranged(send(groups[0]))
        with ThreadPoolExecutor(min(CONCURRENT, len(groups))) as threads:
            return call.arranged([answer for answers in threads.map(send, groups) for answer in answers])

    def describe(self, timeout: float | None = None) -> dict[str, Any]:
        """What the served version says about itself: item ids, named sets, limits, retriever, prompt, parameters.

        Raises:
            InvalidRequestError: the version is too old to describe itself.
            NotFoundError, UnavailableError, DeadlineError: as `retrieve`.
        """
        deadline = self._deadline(timeout)
        request = description_request(self._known(deadline))
        return self._repeat(lambda seconds: self._opened().describe(request, seconds), deadline)

    def facts(self, timeout: float | None = None) -> ModelFacts:
        """What the client itself knows of the model: its batch size, and whether item ids are strings."""
        return self._known(self._deadline(timeout))

    def answered(self, timeout: float | None = None) -> dict[str, int]:
        """{version: requests answered so far}, by the server's statistics: the model itself is not asked."""
        return self._repeat(lambda seconds: self._opened().answered(seconds), self._deadline(timeout))

    def _entries(self, chunk: Chunk, call: Call, deadline: Deadline) -> Sequence[Results | ClientError]:
        """The answer to one request, row by row. An error of the whole request is raised, or given to each row."""
        headers = {**self._options.headers, **call.headers}
        try:
            return self._repeat(lambda seconds: self._opened().infer(chunk, seconds, headers=headers), deadline)
        except ClientError as error:
            if call.return_errors:
                return [error] * chunk.rows
            raise chunk.named(error) from None

    def _deadline(self, timeout: float | None) -> Deadline:
        """The start of every call."""
        where = self._options.where
        if self._closed:
            raise ClientError("this client is closed", where=where)
        if self._wire is not None and self._process != os.getpid():
            raise ClientError(
                f"this client was used in process {self._process} before the fork; make another one in the child",
                where=where,
            )
        return Deadline(self._options.timeout if timeout is None else timeout, where)

    def _opened(self) -> "_Wire":
        wire = self._wire
        if wire is None:  # two threads may both get here; what the slower one makes has opened nothing yet
            if self._options.protocol == "grpc":
                wire = _Grpc(self._options)
            else:
                from trieton_client.http_wire import HttpWire

                wire = HttpWire(self._options)
            if self._wire is None:
                self._wire, self._process = wire, os.getpid()
            wire = self._wire
        return wire

    def _known(self, deadline: Deadline) -> ModelFacts:
        facts = self._facts  # read once: another thread may forget it meanwhile
        if facts is None:
            facts = self._facts = self._repeat(lambda seconds: self._opened().facts(seconds), deadline)
        return facts

    def _repeat(self, ask: Callable[[float], Answer], deadline: Deadline) -> Answer:
        for attempt in range(self._options.retries + 1):
            try:
                answer = ask(deadline.remaining())
                self._met = True
                return answer
            except ClientError as error:
                if self._closed:
                    raise ClientError("this client was closed while the call ran", where=error.where) from None
                if not isinstance(error, UnavailableError):
                    raise
                self._facts = None  # whoever comes back may be configured differently
                pause = deadline.pause(attempt)
                if attempt == self._options.retries or pause is None:
                    raise error if self._met else self._explained(error, deadline) from None
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _explained(self, error: UnavailableError, deadline: Deadline) -> UnavailableError:
        """Who never answered may be something else than a server of this protocol."""
        options = self._options
        mix_up = options.address.mix_up(options.protocol, options.tls is not None, deadline.patience())
        return UnavailableError(error.reason + mix_up, where=error.where)

    def close(self) -> None:
        """Close all connections; calls in flight fail, and so does every call from now on."""
        self._closed = True
        if self._wire is not None and self._process == os.getpid():
            self._wire.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Wire(Protocol):
    """One way to reach the server. Every error is a ClientError."""

    def facts(self, timeout: float) -> ModelFacts: ...

    def answered(self, timeout: float) -> dict[str, int]: ...

    def describe(self, request: Chunk, timeout: float) -> dict[str, Any]: ...

    def infer(self, chunk: Chunk, timeout: float, *, headers: dict[str, str]) -> Sequence[Results | ClientError]: ...

    def close(self) -> None: ...


class _Grpc:
    def __init__(self, options: Options):
        self.options = options
        tls = options.tls.grpc() if options.tls else {}
        self.lines = Lines(
            partial(
                tritonclient.grpc.InferenceServerClient,
                options.address.target,
                channel_args=channel_options(options.address),
                **tls,
            )
        )

    def facts(self, timeout: float) -> ModelFacts:
        model, headers = self.options.model, self.options.headers
        answer = self._ask(lambda client: client.get_model_config(model, headers=headers, client_timeout=timeout))
        return ModelFacts.from_config(MessageToDict(answer.config, preserving_proto_field_name=True))

    def answered(self, timeout: float) -> dict[str, int]:
        model, headers = self.options.model, self.options.headers
        answer = self._ask(
            lambda client: client.get_inference_statistics(model, headers=headers, client_timeout=timeout)
        )
        return count_answers(MessageToDict(answer, preserving_proto_field_name=True))

    def describe(self, request: Chunk, timeout: float) -> dict[str, Any]:
        return read_description(self._infer(request, timeout, self.options.headers), self.options.where)

    def infer(self, chunk: Chunk, timeout: float, *, headers: dict[str, str]) -> Sequence[Results | ClientError]:
        response = self._infer(chunk, timeout, headers)
        return read_results(response, chunk.rows, response.get_response().model_version)

    def _infer(self, chunk: Chunk, timeout: float, headers: dict[str, str]) -> Any:
        inputs, model = chunk.inputs(tritonclient.grpc), self.options.model
        return self._ask(
            lambda client: client.infer(
                model, inputs, parameters=chunk.parameters, headers=headers, client_timeout=timeout
            )
        )

    def _ask(self, ask: Callable[[Any], Any]) -> Any:
        line = self.lines.take()
        started = time.monotonic()
        try:
            answer = ask(line.client)
            line.heard = time.monotonic()
            return answer
        except InferenceServerException as failure:
            error = error_from(failure, self.options.where, self.options.address.proxy_hint())
            if isinstance(error, DeadlineError):
                self.lines.silent(line, started)
            raise error from None
        except ValueError as failure:  # gRPC's, for a channel that has been closed meanwhile
            if self.lines.closed:
                raise UnavailableError(str(failure), where=self.options.where) from None
            raise
        finally:
            for client in self.lines.give(line):
                client.close()

    def close(self) -> None:
        for client in self.lines.close():
            client.close()
