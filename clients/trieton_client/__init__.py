"""Client of the served model; needs tritonclient and numpy only.

    from trieton_client import Client

    with Client("localhost:8001") as client:
        results = client.retrieve([50, 172, 181], constraint="drama and not y1990s", exclude=[50, 172, 181])
        for item_id, score in results:
            ...

`AsyncClient` has the same interface with coroutines.
"""

from trieton_client.aio import AsyncClient
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
