"""Addresses of servers: what may be written, what the libraries get, and the proxy that gRPC would put in between."""

import ipaddress
import os
import re
import socket
from dataclasses import dataclass

DEFAULT_PORTS = {"http": 80, "https": 443}
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")  # what gRPC reads, in its order; only these spellings
NO_PROXY_VARIABLES = ("no_grpc_proxy", "no_proxy")


@dataclass(frozen=True)
class Address:
    """Where a server is.

    Attributes:
        target: what the libraries are given: a gRPC target, or host:port and perhaps a path for HTTP.
        places: host and port of each address in it; a name stays a name, an IPv6 address has no brackets. Empty for a
            Unix socket.
        secure: the scheme asks for TLS.
    """

    target: str
    places: tuple[tuple[str, int], ...]
    secure: bool = False

    @classmethod
    def parse(cls, url: str, protocol: str = "grpc") -> "Address":
        """Read the `url` of a client.

        Args:
            url: host:port, perhaps with a scheme http, https, grpc or grpcs; for gRPC also a target of its own forms.
            protocol: "grpc" or "http".

        Raises:
            ValueError: it is nothing of that; the text says what is expected.
        """
        if not isinstance(url, str):
            raise ValueError(f"url: expected text, got {type(url).__name__}")
        if not url or any(character.isspace() or not character.isprintable() for character in url):
            raise ValueError(f"url: expected host:port, got {url!r}")
        if "@" in url and not url.startswith("unix:"):
            raise ValueError("url: expected host:port without user and password; they belong into `headers`")
        if form := re.fullmatch(r"(dns|ipv4|ipv6|unix):(?!\d+/*$)(.+)", url):
            if protocol != "grpc":
                raise ValueError(f"url: {form[1]}: is an address of gRPC; expected host:port for HTTP, got {url!r}")
            return cls._grpc_target(url, form[1], form[2])
        scheme, separator, rest = url.rpartition("://")
        if scheme not in ("", "http", "https", "grpc", "grpcs") or (separator and not scheme):
            raise ValueError(f"url: expected host:port or a scheme http, https, grpc or grpcs, got {url!r}")
        if scheme in ("grpc", "grpcs") and protocol == "http":
            raise ValueError(f"url: expected an address for HTTP, got {url!r}; protocol='grpc' speaks gRPC")
        rest = rest.rstrip("/")
        host, _, path = rest.partition("/")
        if path and protocol == "grpc":
            raise ValueError(f"url: gRPC has no paths; expected host:port, got {url!r}")
        place = _place(host, url, DEFAULT_PORTS.get(scheme))
        target = _written(place) + (f"/{path}" if path else "")
        return cls(target, (place,), scheme in ("https", "grpcs"))

    @classmethod
    def _grpc_target(cls, url: str, form: str, rest: str) -> "Address":
        if form == "unix":
            return cls(url, ())
        if form == "dns":
            return cls(url, (_place(rest.rsplit("/", 1)[-1], url),))
        places = tuple(_place(text, url) for text in rest.split(","))
        for host, _ in places:
            if form != _family(host):
                raise ValueError(f"url: expected addresses after {form}:, got {host!r} in {url!r}")
        return cls(url, places)

    @property
    def direct(self) -> bool:
        """Whether gRPC must go without a proxy: to this machine, and to lists, which no proxy understands."""
        return len(self.places) != 1 or is_loopback(self.places[0][0])

    def proxy(self) -> tuple[str, str] | None:
        """(variable, proxy without its password) through which gRPC goes to this address, or None."""
        if self.direct:
            return None
        found = [name for name in PROXY_VARIABLES if name in os.environ]  # the first one counts, even when it is empty
        value = os.environ[found[0]] if found else ""
        if not value.startswith("http://") or _excluded(self.places[0][0]):
            return None
        return found[0], value.removeprefix("http://").rpartition("@")[2].rstrip("/")

    def proxy_hint(self) -> str:
        """What an error has to add where a proxy is in between; else empty."""
        found = self.proxy()
        if found is None:
            return ""
        host = self.places[0][0]
        return f" (gRPC goes through the proxy {found[1]} of the variable {found[0]}; no_proxy={host} leaves it out)"

    def spoken(self, timeout: float) -> str | None:
        """What the server at the first address speaks: "http", "grpc" or "tls"; None when it does not say in time."""
        if not self.places:
            return None
        try:
            with socket.create_connection(self.places[0], timeout) as connection:
                connection.settimeout(timeout)
                connection.sendall(b"GET /v2/health/live HTTP/1.0\r\n\r\n")
                first = connection.recv(9)
        except OSError:
            return None
        if first.startswith(b"HTTP/"):
            return "http"
        if first[3:4] == b"\x04":  # a frame with settings: HTTP/2 begins so, whatever it has been sent
            return "grpc"
        return "tls" if first.startswith((b"\x15\x03", b"\x16\x03")) else None

    def mix_up(self, protocol: str, secure: bool, timeout: float) -> str:
        """Why nothing that `protocol` sent was understood, where the port says so; else empty."""
        spoken = self.spoken(timeout)
        if spoken == "tls" and not secure:
            return "; the server speaks TLS: tls=True, or a url https:// or grpcs://"
        if spoken in ("grpc", "http") and secure:
            return "; the server speaks without TLS"
        if (protocol, spoken) == ("grpc", "http"):
            return "; this port speaks HTTP, not gRPC: is it the HTTP port? The server's gRPC port is usually 8001"
        if (protocol, spoken) == ("http", "grpc"):
            return "; this port speaks gRPC, not HTTP: is it the gRPC port? The server's HTTP port is usually 8000"
        return ""


def is_loopback(host: str) -> bool:
    """Whether `host`, as it is written, is this machine; names are not resolved."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _family(host: str) -> str:
    """ "ipv4" or "ipv6" for an address, empty for a name."""
    try:
        return f"ipv{ipaddress.ip_address(host).version}"
    except ValueError:
        return ""


def _excluded(host: str) -> bool:
    """Whether the environment says that `host` is reached without a proxy, by gRPC's rules: endings and networks."""
    found = [name for name in NO_PROXY_VARIABLES if name in os.environ]
    for entry in (os.environ[found[0]] if found else "").split(","):
        entry = entry.strip()
        if entry and host.lower().endswith(entry.lower()):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
        except ValueError:
            continue
    return False


def _place(text: str, url: str, default_port: int | None = None) -> tuple[str, int]:
    """Host and port of host:port. Raises ValueError."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+(?:%\w+)?)\]|([^\[\]:/@?#,]+))(?::(\d{1,5}))?", text)
    if found is None:
        if text.count(":") > 1:
            raise ValueError(f"url: expected host:port, an IPv6 address in brackets ([::1]:8001), got {url!r}")
        raise ValueError(f"url: expected host:port, got {url!r}")
    port = default_port if found[3] is None else int(found[3])
    if port is None:
        raise ValueError(f"url: expected host:port, got {url!r} without a port")
    if not 1 <= port <= 65535:
        raise ValueError(f"url: expected a port of 1 to 65535, got {port} in {url!r}")
    return found[1] or found[2], port


def _written(place: tuple[str, int]) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
