"""Options of both clients: addresses, keys, deadlines and retries."""

import random
import re
import ssl
import time
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from trieton_client.address import Address
from trieton_client.errors import DeadlineError

MODEL = "generative_retriever"
LONGEST = 366 * 86400.0  # seconds; the libraries below cannot count much further


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
    address: Address
    protocol: str
    model: str
    timeout: float
    retries: int
    pool_size: int
    tls: Tls | None
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        url: str,
        protocol: str,
        *,
        model: str = MODEL,
        timeout: float = 10.0,
        retries: int = 3,
        pool_size: int = 16,
        tls: Tls | bool | None = None,
        headers: dict[str, str] | None = None,
    ) -> "Options":
        """Raises ValueError naming the argument."""
        if protocol not in ("grpc", "http"):
            raise ValueError(f"protocol: expected 'grpc' or 'http', got {protocol!r}")
        address = Address.parse(url, protocol)
        if not isinstance(model, str) or not model:
            raise ValueError(f"model: expected a name, got {model!r}")
        for name, value, least in (("retries", retries, 0), ("pool_size", pool_size, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
        if not isinstance(tls, Tls | bool | None):
            raise ValueError(f"tls: expected Tls(...), True or False, got {tls!r}")
        if tls is None:
            tls = address.secure
        chosen = Tls() if tls is True else (tls or None)
        seconds = checked_timeout(timeout)
        return cls(url, address, protocol, model, seconds, retries, pool_size, chosen, checked_headers(headers))

    @property
    def where(self) -> str:
        """Which server an error speaks of."""
        return f"{self.protocol} {self.url}"


def checked_timeout(timeout: Any) -> float:
    """Seconds of a deadline. Raises ValueError."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not 0 < float(timeout) <= LONGEST:
        raise ValueError(f"timeout: expected more than 0 seconds, at most {LONGEST:.0f}, got {timeout!r}")
    return float(timeout)


def checked_headers(headers: Any) -> dict[str, str]:
    """Headers with names in lower case, as gRPC wants them. Raises ValueError for what one of the protocols refuses."""
    if headers is None:
        return {}
    if not isinstance(headers, dict):
        raise ValueError(f"headers: expected a dict of texts, got {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ValueError(f"headers: expected names of letters, digits, '-', '_' and '.', got {name!r}")
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            # Not the value: it may be a secret.
            raise ValueError(f"headers: {name}: expected printable ASCII text as its value")
    return {name.lower(): value for name, value in headers.items()}


class Deadline:
    """The time one call may take, over all its chunks and retries."""

    def __init__(self, timeout: float, where: str):
        self.timeout, self.where = checked_timeout(timeout), where
        self.end = time.monotonic() + self.timeout

    def remaining(self) -> float:
        """Seconds left. Raises DeadlineError when there are none."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"no answer within {self.timeout:g} s", where=self.where)
        return left

    def patience(self, most: float = 0.5) -> float:
        """Seconds that may be spent on finding out what went wrong; little, and something even at the end."""
        return max(0.05, min(most, self.end - time.monotonic()))

    def pause(self, attempt: int) -> float | None:
        """Seconds to wait before retry number `attempt` (from 0); None when the deadline leaves no time for it.

        Doubles from 100 ms, with jitter so that the clients of a server that was away do not come back in step.
        """
        wait = 0.1 * 2**attempt * random.uniform(0.5, 1.5)
        return wait if wait < self.end - time.monotonic() else None
