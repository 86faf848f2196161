#!/usr/bin/env python3
"""Bundles through an object store: `trieton-sync` in the builder image.

    trieton-sync push BUNDLE URL            upload a bundle and make it the one that every server follows
    trieton-sync point URL BUNDLE_ID        make one that is already there the one to follow: a rollback
    trieton-sync follow URL REPOSITORY      beside one server: publish what is pointed at, again and again
    trieton-sync check REPOSITORY           exit code 0 once a server can start on the repository

Layout of the store: `URL/<bundle id>/...`, immutable, and `URL/current`, one small object with a bundle id. A rollout
is one write to it. URL is anything fsspec knows: s3://bucket/path, file:///mnt/share, ...
"""

import re
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import fsspec
import typer
from trieton.bundle import MANIFEST, Bundle, list_files
from trieton_builder.cli.common import clean_errors
from trieton_builder.rollout import publish, rollback
from trieton_builder.rollout.errors import RolloutError
from trieton_builder.rollout.repository import Repository, write_atomically
from trieton_builder.rollout.source import Source

CURRENT = "current"
BUNDLE_ID = re.compile(r"[0-9a-f]{16}")

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


class Store:
    """The object store: bundles under their ids, and a pointer to one of them."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.fs, self.root = fsspec.core.url_to_fs(self.url)

    def current(self) -> str:
        """The bundle id that is pointed at. Raises ValueError when there is no pointer, or it is not a bundle id."""
        self.fs.invalidate_cache()  # fsspec lists folders once and remembers them
        try:
            text = self.fs.cat_file(f"{self.root}/{CURRENT}").decode(errors="replace").strip()
        except FileNotFoundError:
            raise ValueError(f"{self.url}/{CURRENT}: missing; push a bundle first") from None
        return self._checked(text, f"{self.url}/{CURRENT}")

    def point(self, bundle_id: str) -> None:
        """Make `bundle_id` the one to follow. Raises ValueError when the store does not have it."""
        self._checked(bundle_id, "bundle id")
        if not self.fs.exists(f"{self.root}/{bundle_id}/manifest.json"):
            raise ValueError(f"{self.url}/{bundle_id}: no such bundle; push it first")
        self.fs.pipe_file(f"{self.root}/{CURRENT}", f"{bundle_id}\n".encode())

    def push(self, bundle_dir: Path) -> str:
        """Upload a bundle after verifying it; returns its id. The manifest goes last: without it there is no bundle."""
        bundle_id = Bundle.open(bundle_dir, verify=True).bundle_id
        for name in sorted(list_files(bundle_dir), key=lambda name: (name == MANIFEST, name)):
            place = f"{self.root}/{bundle_id}/{name}"
            self.fs.makedirs(place.rsplit("/", 1)[0], exist_ok=True)
            self.fs.put_file(str(bundle_dir / name), place)
        return bundle_id

    def _checked(self, text: str, where: str) -> str:
        if not BUNDLE_ID.fullmatch(text):
            raise ValueError(f"{where}: expected a bundle id of 16 hex digits, got {text[:40]!r}")
        return text


class Follower:
    """Keeps one repository, and the server on it, at what the store points at.

    Args:
        server: host:port of the server's gRPC endpoint. The first bundle is placed before it runs.
        preflight: let a throw-away server load each bundle first; needs its memory a second time.
        keep: versions that stay in the repository.
        allow_dropped_sets: follow to bundles that lack named sets of the one before.
        say: told in one line what was done.
    """

    def __init__(
        self,
        store: Store,
        repository: Path,
        server: str,
        *,
        preflight: bool = False,
        keep: int = 3,
        allow_dropped_sets: bool = False,
        say: Callable[[str], None] = print,
    ):
        self.store, self.server, self.preflight, self.keep, self.say = store, server, preflight, keep, say
        self.allow_dropped_sets = allow_dropped_sets
        self.repository = Repository(repository)
        self.refused: tuple[str, int, float] | None = None  # bundle id, how often, monotonic time of the next try
        self.repository.prepare()
        if not self.repository.key_file.is_file():
            # Made here and read by the server beside us, so nobody else can ever control its models.
            write_atomically(self.repository.key_file, secrets.token_hex(32), mode=0o600)

    def step(self) -> bool:
        """Publish or roll back if the pointer has moved; returns whether it did.

        A bundle that was refused is tried again after a minute, then after longer and longer pauses.

        Raises:
            ValueError, OSError: the store or the server cannot be reached; worth another look soon.
        """
        wanted, current = self.store.current(), self.repository.current()
        if current is not None and self.repository.bundle_id(current) == wanted:
            self.refused = None
            return False
        times = 0
        if self.refused is not None and self.refused[0] == wanted:
            _, times, again = self.refused
            if time.monotonic() < again:
                return False
        servers = []
        if current is not None:
            host, _, port = self.server.rpartition(":")
            socket.create_connection((host, int(port)), timeout=5).close()
            servers = [self.server]
        try:
            older = [
                number for number in self.repository.versions()[:-1] if self.repository.bundle_id(number) == wanted
            ]
            if older:
                rollback(self.repository.root, to=older[-1], servers=servers)
                self.say(f"rolled back to version {older[-1]}, bundle {wanted}")
            else:
                self._publish(wanted, servers)
        except (RolloutError, ValueError) as error:
            self.refused = wanted, times + 1, time.monotonic() + min(60.0 * 2**times, 3600.0)
            self.say(f"bundle {wanted} was refused, what served before serves: {error}")
            return False
        self.refused = None
        return True

    def _publish(self, bundle_id: str, servers: list[str]) -> None:
        address = f"{self.store.url}/{bundle_id}"
        found = Source(address).bundle_id()
        if found != bundle_id:
            raise ValueError(f"{address} holds bundle {found}")
        done = publish(
            address,
            self.repository.root,
            servers=servers,
            preflight=self.preflight,
            keep=self.keep,
            allow_dropped_sets=self.allow_dropped_sets,
        )
        self.say("; ".join([f"bundle {bundle_id} is version {done.version}, {done.outcome}", *done.notes]))


@app.command()
@clean_errors
def push(
    bundle: Annotated[Path, typer.Argument(help="bundle directory")],
    url: Annotated[str, typer.Argument(help="where bundles are")],
    point: Annotated[bool, typer.Option(help="let servers follow it at once")] = True,
) -> None:
    """Upload a bundle and let every server follow it."""
    store = Store(url)
    bundle_id = store.push(bundle)
    if point:
        store.point(bundle_id)
    print(f"{store.url}/{bundle_id}" + (" is followed now" if point else ""))


@app.command("point")
@clean_errors
def point_at(
    url: Annotated[str, typer.Argument(help="where bundles are")],
    bundle_id: Annotated[str, typer.Argument(help="16 hex digits")],
) -> None:
    """Let every server follow a bundle that is already there."""
    Store(url).point(bundle_id)
    print(f"{url}/{bundle_id} is followed now")


@app.command()
@clean_errors
def follow(
    url: Annotated[str, typer.Argument(help="where bundles are")],
    repository: Annotated[Path, typer.Argument(help="model repository of the server beside us")],
    server: Annotated[str, typer.Option(help="its gRPC endpoint")] = "127.0.0.1:8001",
    poll_seconds: Annotated[float, typer.Option(min=0.1)] = 15,
    keep: Annotated[int, typer.Option(min=2, help="versions that stay in the repository")] = 3,
    preflight: Annotated[bool, typer.Option(help="try each bundle in a throw-away server first")] = False,
    allow_dropped_sets: Annotated[
        bool,
        typer.Option(
            envvar="TRIETON_ALLOW_DROPPED_SETS", help="follow to bundles that lack named sets of the one before"
        ),
    ] = False,
) -> None:
    """Publish what the store points at, until ended by SIGTERM."""
    follower = Follower(
        Store(url),
        repository,
        server,
        preflight=preflight,
        keep=keep,
        allow_dropped_sets=allow_dropped_sets,
        say=lambda text: print(text, flush=True),
    )
    said = ""
    while True:
        try:
            follower.step()
            said = ""
        except Exception as error:  # whatever the store's library raises; the next look may succeed
            text = f"{type(error).__name__}: {error}"
            if text != said:
                print(f"cannot follow {url}, trying on: {text}", flush=True)
            said = text
        time.sleep(poll_seconds)


@app.command()
@clean_errors
def check(repository: Annotated[Path, typer.Argument(help="model repository")]) -> None:
    """Exit code 0 once the repository has a version and a control key, so that a server can start on it."""
    found = Repository(repository)
    if found.current() is None or not found.key_file.is_file():
        raise ValueError(f"{repository}: no version yet")


if __name__ == "__main__":
    app()
