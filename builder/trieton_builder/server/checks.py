"""What can be said before the server starts, and what its own words mean: repositories, ports, failed loads."""

import contextlib
import errno
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


def refused_option(log: str) -> str | None:
    """What the server has against its command line, from a log that is its list of options else; None if nothing."""
    if "Usage: tritonserver" not in log:
        return None
    lines = [line for line in log.splitlines() if not line.startswith("Usage:")]
    said = [line for line in (lines[0], *lines[-3:]) if re.search("(?i)unrecognized|ambiguous|invalid|requires", line)]
    return said[0].rpartition("tritonserver: ")[2] if said else "its command line is not understood"


def check_extra_args(extra: Sequence[str], own: Sequence[str]) -> None:
    """Refuse further options of the server that are none, or that would undo what is set anyway. Raises ValueError."""
    repeated = {"--backend-config", "--metrics-config", "--load-model", "--host-policy"}
    taken = {"--model-repository", *(argument.partition("=")[0] for argument in own)} - repeated
    for option in extra:
        name, equals, _ = option.partition("=")
        if not re.fullmatch("--[a-z0-9-]+", name) or not equals:
            raise ValueError(f"options of the server: expected --name=value, got {option!r}")
        if name in taken:
            raise ValueError(f"options of the server: {name} is set here already, got {option!r}; see trieton serve -h")


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


def loopback() -> str:
    """127.0.0.1, or ::1 on a machine that has only that."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return address
    raise ServerError("neither 127.0.0.1 nor ::1 is an address here: this machine has no loopback network")


def choose_ports(wanted: Sequence[int | None], address: str = "127.0.0.1") -> tuple[int, int, int]:
    """Distinct ports for HTTP, gRPC and metrics that are free right now; None means any.

    The sockets are held together while choosing, so that the three differ; the server may still lose a race against
    another program between here and its own bind, which `TritonServer.start` answers with new ports.

    Raises:
        PortTakenError: a port given by number is in use.
        ServerError: the address is none of this machine.
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
            probe = held.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one in TIME_WAIT is free
            try:
                probe.bind((address, port or 0))
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or isinstance(error, socket.gaierror):
                    raise ServerError(f"address {address!r}: not an IP address of this machine") from None
                hint = "ports below 1024 need a right" if error.errno == errno.EACCES else "choose another"
                raise PortTakenError(
                    f"{name} port {port} on {address}: {error.strerror}; {hint}, or 0 for a free one"
                ) from None
            ports.append(probe.getsockname()[1])
    return ports[0], ports[1], ports[2]


def has_space(path: str | Path) -> bool:
    return any(character.isspace() for character in str(path))
