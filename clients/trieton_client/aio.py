"""The client for programs with an event loop."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import tritonclient.grpc.aio
import tritonclient.http.aio
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from trieton_client.channel import Lines, channel_options
from trieton_client.client import CONCURRENT
from trieton_client.errors import NOT_JSON, ClientError, DeadlineError, UnavailableError, error_from
from trieton_client.options import Deadline, Options
from trieton_client.results import Results
from trieton_client.wire import (
    Call,
    Chunk,
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


class AsyncClient:
    """`Client` with coroutines: the same arguments, results, errors, deadlines and retries.

    Belongs to the event loop in which it is first used. Make one and keep it: connections are opened at the first call
    and closed by `close` or `async with`.
    """

    def __init__(self, url: str, protocol: str = "grpc", **options: "Unpack[ClientArguments]"):
        options.setdefault("pool_size", 100)
        self._options = Options.checked(url, protocol, **options)
        self._wire: _Wire | None = None
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._facts: ModelFacts | None = None
        self._met = False
        self._closed = False

    async def retrieve(
        self, history: Any = None, num_results: int = 10, **arguments: "Unpack[RetrieveArguments]"
    ) -> Any:
        """See `Client.retrieve`."""
        call = Call.checked(history, num_results, **arguments)
        deadline = self._deadline(call.timeout)
        groups = call.groups(await self._known(deadline))
        room = asyncio.Semaphore(CONCURRENT)

        async def send(group: list[Chunk]) -> list[tuple[Chunk, Sequence[Results | ClientError]]]:
            async with room:
                return [(chunk, await self._entries(chunk, call, deadline)) for chunk in group]

        if len(groups) == 1:
            return call.arranged(await send(groups[0]))
        tasks = [asyncio.ensure_future(send(group)) for group in groups]
        try:
            return call.arranged([answer for answers in await asyncio.gather(*tasks) for answer in answers])
        finally:
            for task in tasks:  # those that are still under way when one has failed
                task.cancel()

    async def describe(self, timeout: float | None = None) -> dict[str, Any]:
        """See `Client.describe`."""
        deadline = self._deadline(timeout)
        request = description_request(await self._known(deadline))

        async def ask(seconds: float) -> dict[str, Any]:
            response = await self._opened().infer(request, seconds, headers=self._options.headers)
            return read_description(response, self._options.where)

        return await self._repeat(ask, deadline)

    async def facts(self, timeout: float | None = None) -> ModelFacts:
        """See `Client.facts`."""
        return await self._known(self._deadline(timeout))

    async def answered(self, timeout: float | None = None) -> dict[str, int]:
        """See `Client.answered`."""
        return await self._repeat(lambda seconds: self._opened().answered(seconds), self._deadline(timeout))

    async def _entries(self, chunk: Chunk, call: Call, deadline: Deadline) -> Sequence[Results | ClientError]:
        headers = {**self._options.headers, **call.headers}

        async def ask(seconds: float) -> Sequence[Results | ClientError]:
            wire = self._opened()
            response = await wire.infer(chunk, seconds, headers=headers)
            return read_results(response, chunk.rows, wire.version(response))

        try:
            return await self._repeat(ask, deadline)
        except ClientError as error:
            if call.return_errors:
                return [error] * chunk.rows
            raise chunk.named(error) from None

    def _deadline(self, timeout: float | None) -> Deadline:
        """The start of every call."""
        where = self._options.where
        if self._closed:
            raise ClientError("this client is closed", where=where)
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._owner is None:
            self._owner = owner
        elif self._owner != owner:
            raise ClientError("this client belongs to another event loop or process; make one in each", where=where)
        return Deadline(self._options.timeout if timeout is None else timeout, where)

    def _opened(self) -> "_Wire":
        if self._wire is None:
            self._wire = _Grpc(self._options) if self._options.protocol == "grpc" else _Http(self._options)
        return self._wire

    async def _known(self, deadline: Deadline) -> ModelFacts:
        facts = self._facts  # read once: another task may forget it meanwhile
        if facts is None:
            facts = self._facts = await self._repeat(lambda seconds: self._opened().facts(seconds), deadline)
        return facts

    async def _repeat(self, ask: Callable[[float], Awaitable[Answer]], deadline: Deadline) -> Answer:
        for attempt in range(self._options.retries + 1):
            try:
                answer = await ask(deadline.remaining())
                self._met = True
                return answer
            except ClientError as error:
                if self._closed:
                    raise ClientError("this client was closed while the call ran", where=error.where) from None
                if not isinstance(error, UnavailableError):
                    raise
                self._facts = None
                pause = deadline.pause(attempt)
                if attempt == self._options.retries or pause is None:
                    raise error if self._met else await self._explained(error, deadline) from None
                await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _explained(self, error: UnavailableError, deadline: Deadline) -> UnavailableError:
        options = self._options
        look = partial(options.address.mix_up, options.protocol, options.tls is not None, deadline.patience())
        return UnavailableError(error.reason + await asyncio.to_thread(look), where=error.where)

    async def close(self) -> None:
        """Close all connections; calls in flight fail, and so does every call from now on."""
        self._closed = True
        if self._wire is not None:
            await self._wire.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class _Wire:
    """One way to reach the server. Every error is a ClientError."""

    def __init__(self, options: Options, open_client: Callable[[], Any]):
        self.options = options
        self.lines = Lines(open_client)

    async def facts(self, timeout: float) -> ModelFacts:
        return ModelFacts.from_config(await self._asked("get_model_config", timeout))

    async def answered(self, timeout: float) -> dict[str, int]:
        return count_answers(await self._asked("get_inference_statistics", timeout))

    async def infer(self, chunk: Chunk, timeout: float, *, headers: dict[str, str]) -> Any:
        raise NotImplementedError

    async def _asked(self, method: str, timeout: float) -> dict[str, Any]:
        raise NotImplementedError

    def version(self, response: Any) -> str:
        raise NotImplementedError

    def _error(self, failure: Exception, timeout: float) -> ClientError:
        raise NotImplementedError

    async def _ask(self, ask: Callable[[Any], Awaitable[Any]], timeout: float) -> Any:
        line = self.lines.take()
        started = time.monotonic()
        try:
            answer = await ask(line.client)
            line.heard = time.monotonic()
            return answer
        except asyncio.CancelledError:
            if self.lines.closed and not _is_cancelled():  # how gRPC ends the calls of a channel that is closed
                raise UnavailableError("closed", where=self.options.where) from None
            raise
        except Exception as failure:
            error = self._error(failure, timeout)
            if isinstance(error, DeadlineError):
                self.lines.silent(line, started)
            raise error from None
        finally:
            for client in self.lines.give(line):
                await client.close()

    async def close(self) -> None:
        for client in self.lines.close():
            await client.close()


class _Grpc(_Wire):
    def __init__(self, options: Options):
        tls = options.tls.grpc() if options.tls else {}
        open_client = partial(
            tritonclient.grpc.aio.InferenceServerClient,
            options.address.target,
            channel_args=channel_options(options.address),
            **tls,
        )
        super().__init__(options, open_client)

    async def infer(self, chunk: Chunk, timeout: float, *, headers: dict[str, str]) -> Any:
        inputs, model = chunk.inputs(tritonclient.grpc.aio), self.options.model
        return await self._ask(
            lambda client: client.infer(
                model, inputs, parameters=chunk.parameters, headers=headers, client_timeout=timeout
            ),
            timeout,
        )

    async def _asked(self, method: str, timeout: float) -> dict[str, Any]:
        model, headers = self.options.model, self.options.headers
        answer = await self._ask(
            lambda client: getattr(client, method)(model, headers=headers, client_timeout=timeout), timeout
        )
        found: dict[str, Any] = MessageToDict(answer, preserving_proto_field_name=True)
        return found.get("config", found)

    def version(self, response: Any) -> str:
        return str(response.get_response().model_version)

    def _error(self, failure: Exception, timeout: float) -> ClientError:
        if not isinstance(failure, InferenceServerException):
            raise failure
        return error_from(failure, self.options.where, self.options.address.proxy_hint())


class _Http(_Wire):
    def __init__(self, options: Options):
        tls = {"ssl": True, "ssl_context": options.tls.context()} if options.tls else {}
        # The deadline of a call is kept by wait_for; conn_timeout would be one for all calls.
        open_client = partial(
            tritonclient.http.aio.InferenceServerClient,
            options.address.target,
            conn_limit=options.pool_size,
            conn_timeout=None,
            **tls,
        )
        super().__init__(options, open_client)

    async def infer(self, chunk: Chunk, timeout: float, *, headers: dict[str, str]) -> Any:
        inputs, model = chunk.inputs(tritonclient.http.aio), self.options.model
        return await self._ask(
            lambda client: asyncio.wait_for(
                client.infer(model, inputs, parameters=chunk.parameters, headers=headers), timeout
            ),
            timeout,
        )

    async def _asked(self, method: str, timeout: float) -> dict[str, Any]:
        model, headers = self.options.model, self.options.headers
        return dict(
            await self._ask(
                lambda client: asyncio.wait_for(getattr(client, method)(model, headers=headers), timeout), timeout
            )
        )

    def version(self, response: Any) -> str:
        return str(response.get_response()["model_version"])

    def _error(self, failure: Exception, timeout: float) -> ClientError:
        where = self.options.where
        if isinstance(failure, TimeoutError | asyncio.TimeoutError):
            return DeadlineError(f"no answer within {timeout:.3g} s", where=where)
        if isinstance(failure, InferenceServerException):
            return error_from(failure, where)
        if isinstance(failure, aiohttp.ClientError | OSError):
            return UnavailableError(f"cannot reach the server ({failure})", where=where)
        if isinstance(failure, ValueError):  # of whichever parser tritonclient has
            return UnavailableError(NOT_JSON, where=where)
        raise failure


def _is_cancelled() -> bool:
    """Whether somebody cancels the task that runs; Python 3.10 does not tell."""
    task = asyncio.current_task()
    return bool(task is not None and hasattr(task, "cancelling") and task.cancelling())
