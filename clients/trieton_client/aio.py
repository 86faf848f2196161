"""The client for programs with an event loop."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import aiohttp
import tritonclient.grpc.aio
import tritonclient.http.aio
from google.protobuf.json_format import MessageToDict
from tritonclient.utils import InferenceServerException

from trieton_client.client import GRPC_OPTIONS
from trieton_client.errors import DeadlineError, UnavailableError, error_from
from trieton_client.options import MODEL, Deadline, Options, Tls
from trieton_client.results import Results
from trieton_client.wire import Call, Chunk, ModelFacts, read_results

Answer = TypeVar("Answer")


class AsyncClient:
    """`Client` with coroutines: the same arguments, results, errors, deadlines and retries.

    Belongs to the event loop in which it is first used. Make one and keep it: connections are opened at the first call
    and closed by `close` or `async with`.
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
        pool_size: int = 100,
    ):
        self._options = Options.checked(
            url, protocol, model=model, timeout=timeout, retries=retries, tls=tls, headers=headers
        )
        self._pool_size = pool_size
        self._opened: _Wire | None = None
        self._facts: ModelFacts | None = None

    async def retrieve(
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
        """See `Client.retrieve`."""
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
        facts = await self._described(deadline)
        infer = partial(self._wire().infer, parameters=call.parameters, headers=self._options.headers | (headers or {}))
        results: list[Results] = []
        for chunk in call.chunks(facts):
            results += await self._repeat(partial(infer, chunk), deadline)
        return results[0] if call.single else results

    async def describe(self, timeout: float | None = None) -> ModelFacts:
        """See `Client.describe`."""
        seconds = self._options.timeout if timeout is None else timeout
        return await self._described(Deadline(seconds, self._options.where))

    async def _described(self, deadline: Deadline) -> ModelFacts:
        facts = self._facts  # read once: another task may forget it meanwhile
        if facts is None:
            facts = self._facts = await self._repeat(self._wire().facts, deadline)
        return facts

    def _wire(self) -> "_Wire":
        if self._opened is None:
            options = self._options
            self._opened = _Grpc(options) if options.protocol == "grpc" else _Http(options, self._pool_size)
        return self._opened

    async def _repeat(self, ask: Callable[[float], Awaitable[Answer]], deadline: Deadline) -> Answer:
        for attempt in range(self._options.retries + 1):
            try:
                return await ask(deadline.remaining())
            except UnavailableError:
                self._facts = None
                pause = deadline.pause(attempt)
                if attempt == self._options.retries or pause is None:
                    raise
                await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Close all connections; calls in flight fail."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            await opened.client.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class _Wire(Protocol):
    client: Any

    async def facts(self, timeout: float) -> ModelFacts: ...

    async def infer(
        self, chunk: Chunk, timeout: float, *, parameters: dict, headers: dict[str, str]
    ) -> list[Results]: ...


class _Grpc:
    def __init__(self, options: Options):
        self.options = options
        tls = options.tls.grpc() if options.tls else {}
        self.client = tritonclient.grpc.aio.InferenceServerClient(options.url, channel_args=GRPC_OPTIONS, **tls)

    async def facts(self, timeout: float) -> ModelFacts:
        try:
            response = await self.client.get_model_config(
                self.options.model, headers=self.options.headers, client_timeout=timeout
            )
        except InferenceServerException as failure:
            raise error_from(failure, self.options.where) from None
        return ModelFacts.from_config(MessageToDict(response.config, preserving_proto_field_name=True))

    async def infer(self, chunk: Chunk, timeout: float, *, parameters: dict, headers: dict[str, str]) -> list[Results]:
        try:
            response = await self.client.infer(
                self.options.model,
                chunk.inputs(tritonclient.grpc.aio),
                parameters=parameters,
                headers=headers,
                client_timeout=timeout,
            )
        except InferenceServerException as failure:
            raise error_from(failure, self.options.where) from None
        return read_results(response, chunk.rows, response.get_response().model_version)


class _Http:
    def __init__(self, options: Options, pool_size: int):
        self.options = options
        tls = {"ssl": True, "ssl_context": options.tls.context()} if options.tls else {}
        # The deadline of a call is kept by _bounded; conn_timeout would be one for all calls.
        self.client = tritonclient.http.aio.InferenceServerClient(
            options.url, conn_limit=pool_size, conn_timeout=None, **tls
        )

    async def facts(self, timeout: float) -> ModelFacts:
        config = await self._bounded(
            self.client.get_model_config(self.options.model, headers=self.options.headers), timeout
        )
        return ModelFacts.from_config(config)

    async def infer(self, chunk: Chunk, timeout: float, *, parameters: dict, headers: dict[str, str]) -> list[Results]:
        response = await self._bounded(
            self.client.infer(
                self.options.model,
                chunk.inputs(tritonclient.http.aio),
                parameters=parameters,
                headers=headers,
            ),
            timeout,
        )
        return read_results(response, chunk.rows, response.get_response()["model_version"])

    async def _bounded(self, coroutine: Any, timeout: float) -> Any:
        where = self.options.where
        try:
            return await asyncio.wait_for(coroutine, timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise DeadlineError(f"no answer within {timeout:.3g} s", where=where) from None
        except InferenceServerException as failure:
            raise error_from(failure, where) from None
        except (aiohttp.ClientError, OSError) as failure:
            raise UnavailableError(f"cannot reach the server ({failure})", where=where) from None
        except json.JSONDecodeError as failure:
            raise UnavailableError(f"not a Triton server ({failure})", where=where) from None
