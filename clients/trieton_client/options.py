"""Options of both clients: addresses, keys, deadlines and retries."""

import random
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path

from trieton_client.errors import DeadlineError

MODEL = "generative_retriever"


@dataclass(frozen=True)
class Tls:
    """Files in PEM form for an encrypted connection.

    Attributes:
        ca: certificates to trust; the system's when None.
        cert: the client's certificate chain, for servers that ask for one.
        key: the client's private key.
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("Tls: cert and key belong together, got only one of them")
        for name in ("ca", "cert", "key"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ValueError(f"Tls: {name}: no such file: {path}")

    def context(self) -> ssl.SSLContext:
        """For HTTP."""
        context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
        if self.cert is not None and self.key is not None:
            context.load_cert_chain(str(self.cert), str(self.key))
        return context

    def grpc(self) -> dict[str, object]:
        """Keyword arguments of tritonclient's gRPC clients."""
        return {
            "ssl": True,
            "root_certificates": None if self.ca is None else str(self.ca),
            "certificate_chain": None if self.cert is None else str(self.cert),
            "private_key": None if self.key is None else str(self.key),
        }


@dataclass(frozen=True)
class Options:
    """What every call of one client shares. Checked here, once, for both clients."""

    url: str
    protocol: str
    model: str
    timeout: float
    retries: int
    tls: Tls | None
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        url: str,
        protocol: str,
        *,
        model: str,
        timeout: float,
        retries: int,
        tls: Tls | bool | None,
        headers: dict[str, str] | None,
    ) -> "Options":
        """Raises ValueError naming the argument."""
        if protocol not in ("grpc", "http"):
            raise ValueError(f"protocol: expected 'grpc' or 'http', got {protocol!r}")
        scheme, _, rest = url.rpartition("://")
        if scheme not in ("", "http", "https", "grpc", "grpcs") or not rest.strip("/"):
            raise ValueError(f"url: expected host:port, got {url!r}")
        if timeout <= 0 or retries < 0:
            raise ValueError(f"expected timeout > 0 and retries >= 0, got {timeout} and {retries}")
        if tls is None:
            tls = scheme in ("https", "grpcs")
        chosen = Tls() if tls is True else (tls or None)
        return cls(rest.rstrip("/"), protocol, model, timeout, retries, chosen, dict(headers or {}))

    @property
    def where(self) -> str:
        """Which server an error speaks of."""
        return f"{self.protocol} {self.url}"


class Deadline:
    """The time one call may take, over all its chunks and retries."""

    def __init__(self, timeout: float, where: str):
        if not timeout > 0:
            raise ValueError(f"timeout: expected more than 0 seconds, got {timeout}")
        self.timeout, self.where = timeout, where
        self.end = time.monotonic() + timeout

    def remaining(self) -> float:
        """Seconds left. Raises DeadlineError when there are none."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"no answer within {self.timeout:g} s", where=self.where)
        return left

    def pause(self, attempt: int) -> float | None:
        """Seconds to wait before retry number `attempt` (from 0); None when the deadline leaves no time for it.

        Doubles from 100 ms, with jitter so that the clients of a server that was away do not come back in step.
        """
        wait = 0.1 * 2**attempt * random.uniform(0.5, 1.5)
        return wait if wait < self.end - time.monotonic() else None
