"""Which servers a rollout is about, and which repository each of them reads."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from trieton_builder.rollout.control import ServerControl
from trieton_builder.rollout.repository import Repository, write_atomically
from trieton_builder.rollout.steps import Listener, Steps
from trieton_builder.server.leftovers import NAMESPACE

KEY_VARIABLE = "TRIETON_CONTROL_KEY"


@dataclass(frozen=True)
class Endpoint:
    """A server to change.

    Attributes:
        url: host:port of its gRPC endpoint.
        control_key: opens its model-control endpoints; None looks it up, see `find_key`.
        repository: the repository it reads; None means the one of the command.
    """

    url: str
    control_key: str | None = None
    repository: str | os.PathLike[str] | None = None

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """From "HOST:PORT" or "HOST:PORT=REPOSITORY"."""
        url, _, folder = text.partition("=")
        host, _, port = url.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"server {text!r}: expected HOST:PORT (gRPC) or HOST:PORT=REPOSITORY")
        return cls(url, repository=folder or None)


@dataclass
class Target:
    """One repository and the servers that read it, in the order in which they are changed."""

    repository: Repository
    servers: list[ServerControl] = field(default_factory=list)


@contextlib.contextmanager
def open_targets(
    repository: str | os.PathLike[str],
    servers: Sequence[str | Endpoint] | None,
    *,
    control_key: str | None = None,
    load_timeout: float = 600.0,
) -> Iterator[list[Target]]:
    """Group servers by repository and connect to them.

    Args:
        repository: what every server reads whose entry names none.
        servers: endpoints, or their text, see `Endpoint.parse`. None: those that `trieton serve` runs on this
            repository right now, if any. Empty: no server is told anything.
        control_key: for the endpoints that bring none.
    """
    default = Repository(repository)
    if servers is None:
        servers = running_servers(default)
    endpoints = [server if isinstance(server, Endpoint) else Endpoint.parse(server) for server in servers]
    targets: dict[Path, Target] = {}
    if not endpoints or any(endpoint.repository is None for endpoint in endpoints):
        targets[default.root] = Target(default)
    try:
        for endpoint in endpoints:
            place = default if endpoint.repository is None else Repository(endpoint.repository)
            target = targets.setdefault(place.root, Target(place))
            given = (endpoint.control_key, control_key)
            key = next((key for key in given if key is not None), None)
            if key is None:
                key = find_key(target.repository)
            target.servers.append(ServerControl(endpoint.url, target.repository, key=key, load_timeout=load_timeout))
        yield list(targets.values())
    finally:
        for target in targets.values():
            for control in target.servers:
                control.close()


@dataclass(frozen=True)
class Reach:
    """How a command reaches its servers and excludes other commands; see `open_targets` and `locked`.

    Attributes:
        wait: seconds to wait for another publisher.
        command: for the ledger; None takes this process's command line.
        listener: told of each step, see `Steps`.
    """

    servers: Sequence[str | Endpoint] | None = None
    control_key: str | None = None
    wait: float = 0.0
    load_timeout: float = 600.0
    command: str | None = None
    listener: Listener | None = None

    def targets(self, repository: str | os.PathLike[str]) -> contextlib.AbstractContextManager[list[Target]]:
        return open_targets(repository, self.servers, control_key=self.control_key, load_timeout=self.load_timeout)


@contextlib.contextmanager
def locked(targets: Sequence[Target], wait: float, steps: Steps, *, create: bool = False) -> Iterator[None]:
    """Hold the locks of all repositories, always taken in the same order.

    Args:
        steps: told what a filesystem lacks.
        create: make a repository that does not exist yet; else that is an error.
    """
    with contextlib.ExitStack() as locks:
        for target in sorted(targets, key=lambda target: str(target.repository)):
            if not create:
                target.repository.require()
            target.repository.prepare()
            locks.enter_context(target.repository.lock(wait, steps.note))
        yield


def find_key(repository: Repository) -> str:
    """The control key from the variable TRIETON_CONTROL_KEY or the file beside the repository; empty without either."""
    key = os.environ.get(KEY_VARIABLE)
    if key is None and repository.key_file.is_file():
        return read_key(repository.key_file)
    return key or ""


def read_key(path: Path) -> str:
    """The key in a file. Raises ValueError when it holds none."""
    key = path.read_text().strip()
    if not key or not key.isprintable() or " " in key:
        raise ValueError(f"{path}: expected one line with a key, got {'nothing' if not key else 'something else'}")
    return key


def ensure_key(repository: Repository) -> str:
    """`find_key`, or a new random key in a file beside the repository that only its owner may read."""
    key = find_key(repository)
    if not key:
        key = secrets.token_hex(16)
        write_atomically(repository.key_file, key + "\n", mode=0o600)
    return key


def remember_server(repository: Repository, grpc_url: str, pid: int) -> Path:
    """Write down that a server runs on this repository, for publishers on this machine. Returns the file to remove.

    Each server has a file of its own, so that several on one repository are all known, whichever ends first.
    """
    repository.server_dir.mkdir(exist_ok=True)
    path = repository.server_dir / f"{pid}.json"
    process = psutil.Process(pid)
    noted = {"grpc": grpc_url, "pid": pid, "started": process.create_time(), "namespace": os.readlink(NAMESPACE)}
    write_atomically(path, json.dumps(noted) + "\n")
    return path


def running_servers(repository: Repository) -> list[str]:
    """gRPC addresses of the servers that `trieton serve` runs on this repository on this machine, oldest first."""
    running = []
    for path in repository.server_dir.glob("*.json") if repository.server_dir.is_dir() else ():
        try:
            noted = json.loads(path.read_text())
            if noted["namespace"] != os.readlink(NAMESPACE):
                continue  # of another container, where the same number is another process
            process = psutil.Process(noted["pid"])
            # A process id is used again, so the start counts, too.
            if "tritonserver" in process.name() and abs(process.create_time() - noted["started"]) < 1:
                running.append((noted["started"], noted["grpc"]))
        except (OSError, ValueError, KeyError, TypeError, psutil.Error):
            continue  # it has ended, or is just being written down
    return [grpc for _, grpc in sorted(running)]


def forget_dead_servers(repository: Repository) -> None:
    """Remove what killed `trieton serve` commands of this process namespace left written down. Only under the lock."""
    for path in repository.server_dir.glob("*.json") if repository.server_dir.is_dir() else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            noted = json.loads(path.read_text())
            if noted["namespace"] == os.readlink(NAMESPACE) and not psutil.pid_exists(noted["pid"]):
                path.unlink()
