"""Client of the served model; needs tritonclient and numpy only.

    from trieton_client import Client

    with Client("localhost:8001") as client:
        results = client.retrieve([50, 172, 181], constraint="drama and not y1990s", exclude=[50, 172, 181])
        for item_id, score in results:
            ...

`AsyncClient` has the same interface with coroutines.
"""

from typing import TYPE_CHECKING

from trieton_client.client import Client
from trieton_client.errors import (
    ClientError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    ServerError,
    UnavailableError,
)
from trieton_client.options import Tls
from trieton_client.results import Results
from trieton_client.wire import ModelFacts

if TYPE_CHECKING:
    from trieton_client.aio import AsyncClient
else:
    # At its first use: what it needs (aiohttp) takes longer to import than all the rest of this package.
    def __getattr__(name: str) -> object:
        if name == "AsyncClient":
            from trieton_client.aio import AsyncClient

            return AsyncClient
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "AsyncClient",
    "Client",
    "ClientError",
    "DeadlineError",
    "InvalidRequestError",
    "ModelFacts",
    "NotFoundError",
    "Results",
    "ServerError",
    "Tls",
    "UnavailableError",
]
