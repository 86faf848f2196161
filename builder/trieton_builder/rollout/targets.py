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
from trieton_builder.rollout.errors import NoControlError, RolloutError
from trieton_builder.rollout.repository import Repository, write_atomically
from trieton_builder.rollout.steps import Steps

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
        servers: endpoints, or their text, see `Endpoint.parse`. None: the server that `trieton serve` runs on this
            repository right now, if it does. Empty: no server is told anything.
        control_key: for the endpoints that bring none.
    """
    default = Repository(repository)
    if servers is None:
        running = running_server(default)
        servers = [] if running is None else [running]
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


@contextlib.contextmanager
def locked(targets: Sequence[Target], wait: float, *, create: bool = False) -> Iterator[None]:
    """Hold the locks of all repositories, always taken in the same order.

    Args:
        create: make a repository that does not exist yet; else that is an error.
    """
    with contextlib.ExitStack() as locks:
        for target in sorted(targets, key=lambda target: str(target.repository)):
            if not create:
                target.repository.require()
            target.repository.prepare()
            locks.enter_context(target.repository.lock(wait))
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


def remember_server(repository: Repository, grpc_url: str, pid: int) -> None:
    """Write down that a server runs on this repository, for publishers on this machine."""
    write_atomically(repository.server_file, json.dumps({"grpc": grpc_url, "pid": pid}) + "\n")


def running_server(repository: Repository) -> str | None:
    """gRPC address of the server that `trieton serve` runs on this repository on this machine, or None."""
    try:
        noted = json.loads(repository.server_file.read_text())
        process = psutil.Process(noted["pid"])
        return noted["grpc"] if "tritonserver" in process.name() else None
    except (OSError, ValueError, KeyError, psutil.Error):
        return None


def activate(control: ServerControl, version: int, previous: int | None, steps: Steps, *, keep_previous: bool) -> None:
    """Let one server answer from `version`.

    With `keep_previous` the version before stays resident, so going back takes milliseconds. Anything older is dropped
    first: never more than two versions are in memory.

    Raises:
        RolloutError: the server refused or failed; `previous` answers as before.
    """
    patience = 30.0
    with steps.step("load", f"{control.url} loads version {version}"):
        try:
            resident = control.ready_versions()
            keep = [previous] if keep_previous and previous in resident else []
            if keep and set(resident) - {previous, version}:
                control.load(keep)
            control.load([*keep, version])
        except NoControlError:
            patience = control.load_timeout
            steps.note(f"{control.url} is not in EXPLICIT mode: waiting until it takes version {version} by itself")
    with steps.step("ready", f"{control.url} holds version {version} ready"):
        control.wait_ready(version, patience)
        if not control.server_ready():
            steps.note(
                f"{control.url} calls itself not ready although version {version} is: it runs with strict readiness; "
                "start it with --strict-readiness=false"
            )


def go_back(control: ServerControl, previous: int | None) -> str | None:
    """Let one server answer from `previous` again (from nothing when None). Returns what went wrong, if anything."""
    try:
        if previous is None:
            control.unload()
        else:
            control.load([previous])
            control.wait_ready(previous)
    except NoControlError:
        return f"{control.url} is not in EXPLICIT mode; if it does not end by itself on the old version, restart it"
    except RolloutError as error:
        return str(error)
    return None
