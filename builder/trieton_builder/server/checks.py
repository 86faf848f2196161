"""What can be said before the server starts, and what its own words mean: repositories, ports, failed loads."""

import contextlib
import re
import socket
from collections.abc import Sequence
from pathlib import Path


class ServerError(OSError):
    """The server could not start, or ended; the text ends with the last lines of its log."""


class PortTakenError(ServerError):
    """A port that was asked for is in use."""


def load_failure(text: str) -> str | None:
    """The model's own reason in one line, from what the server says about a failed load; None if it does not."""
    found = re.search(
        r"version (\d+) is at UNAVAILABLE state: (?:Internal: )?(.*?)(?:\n+At:|\n;|;\s*$|\nI\d{4} |\Z)", text, re.S
    )
    return None if found is None else f"version {found[1]} does not start: {' '.join(found[2].split())}"


def check_repository(repository: Path, load: Sequence[str]) -> None:
    """Refuse a repository on which the server would fail with a riddle, or hang.

    A numbered version of a Python model without `model.py` makes the server hang for ever, deaf to SIGTERM (seen).
    """
    if not repository.is_dir():
        raise ServerError(f"model repository {repository}: no such folder")
    for name in load:
        model = repository / name
        if not model.is_dir():
            have = ", ".join(sorted(path.name for path in repository.iterdir() if path.is_dir()))
            raise ServerError(f"model repository {repository} has no model {name!r} (there: {have or 'nothing'})")
        config = model / "config.pbtxt"
        if not config.is_file():
            raise ServerError(f"{model} has no config.pbtxt: not a model")
        versions = [path for path in model.iterdir() if path.is_dir() and path.name[:1].isdigit()]
        if not versions:
            raise ServerError(f"{model} has no version yet: publish one first (trieton publish BUNDLE {repository})")
        if 'backend: "python"' in config.read_text():
            for version in versions:
                if not (version / "model.py").is_file():
                    raise ServerError(f"{version} has no model.py; the server would hang on it: remove that folder")


def choose_ports(wanted: Sequence[int | None], address: str = "127.0.0.1") -> tuple[int, int, int]:
    """Distinct ports for HTTP, gRPC and metrics that are free right now; None means any.

    The sockets are held together while choosing, so that the three differ; the server may still lose a race against
    another program between here and its own bind, which `TritonServer.start` answers with new ports.

    Raises:
        PortTakenError: a port given by number is in use.
        ValueError: no port, or one number for two endpoints.
    """
    given: dict[int, str] = {}
    for name, port in zip(("HTTP", "gRPC", "metrics"), wanted, strict=True):
        if port is not None and not 0 <= port <= 65535:
            raise ValueError(f"{name} port: expected 0 to 65535, got {port}")
        if port and given.setdefault(port, name) != name:
            raise ValueError(f"{name} port: expected another one than the {given[port]} port, got {port} for both")
    with contextlib.ExitStack() as held:
        ports = []
        for name, port in zip(("HTTP", "gRPC", "metrics"), wanted, strict=True):
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one in TIME_WAIT is free
            try:
                probe.bind((address, port or 0))
            except OSError as error:
                raise PortTakenError(
                    f"{name} port {port} on {address}: {error.strerror}; choose another, or 0 for a free one"
                ) from None
            ports.append(probe.getsockname()[1])
    return ports[0], ports[1], ports[2]


def has_space(path: str | Path) -> bool:
    return any(character.isspace() for character in str(path))
