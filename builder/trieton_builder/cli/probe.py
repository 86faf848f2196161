"""`trieton probe`: does the model really answer? The server's own health endpoints cannot tell.

When the model's process dies, server and model go on saying that they are ready while every request fails, and nothing
restarts it (seen on 2.51.0). A real search finds that out.
"""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, fail, out
from trieton_builder.cli.query import MODEL, PROTOCOL, URL

if TYPE_CHECKING:
    from trieton_client import Client

BUSY = "queue size"  # what the server says when its queue is full


@app.command()
@clean_errors
def probe(
    url: str = URL,
    protocol: str = PROTOCOL,
    model: str = MODEL,
    timeout: float = typer.Option(2.0, "--timeout", "-t", min=0.001, help="Seconds until no answer is an answer."),
    live: bool = typer.Option(False, help="For liveness: alive as well while other requests are answered."),
    revive: Path | None = typer.Option(
        None, help="On failure, start the model anew; needs the server's model repository (gRPC only)."
    ),
    control_key: str = typer.Option("", envvar="TRIETON_CONTROL_KEY", help="Key of the server's model control."),
) -> None:
    """Send one small search and exit with 0 if it was answered, else with 1.

    The search takes one token, one beam and one result: it goes through queue, process, model, index and back, and
    needs no item of the catalogue. With --live it may wait in the queue behind all other requests: then the server's
    statistics tell whether others were answered meanwhile.
    """
    from trieton_client import Client, ClientError, InvalidRequestError, NotFoundError

    with Client(url, protocol, model=model, timeout=timeout, retries=0) as client:
        try:
            out.print(f"{'alive' if live else 'ok'}: {url}: {_look(client, timeout) if live else _search(client)}")
            return
        except ClientError as error:
            failure = error
    if not listens(url, protocol, timeout):
        fail(f"{failure}; no server listens there: trieton serve REPOSITORY starts one, --url names another")
    if isinstance(failure, NotFoundError):
        fail(f"{failure}; trieton publish BUNDLE REPOSITORY loads one, --model names another")
    if isinstance(failure, InvalidRequestError):
        fail(str(failure))
    if revive is None:
        fail(f"{failure}; restart the server, or: trieton probe --url {url} --revive REPOSITORY")
    restart(url, model, revive, control_key)
    with Client(url, protocol, model=model, timeout=timeout, retries=0) as client:
        out.print(f"revived: {url}: {_search(client)} (it was: {failure.reason})")


def _search(client: "Client", timeout: float | None = None) -> str:
    """Which bundle answers a real search. Raises ClientError."""
    results = client.retrieve(input_ids=[0], num_results=1, beam_width=1, timeout=timeout)
    return f"bundle {results.bundle_id}, version {results.model_version}"


def _look(client: "Client", timeout: float) -> str:
    """What shows that the model's process works, within `timeout` seconds.

    A search that is answered, or, where it only waits, requests that were answered while it did. A process that is dead
    or hangs answers nothing: its requests fail at once, or nothing moves.

    Raises:
        ClientError: neither; the search's own error.
    """
    from trieton_client import ClientError, DeadlineError, UnavailableError

    end = time.monotonic() + timeout
    before = client.answered(timeout)
    try:
        return _search(client, 0.8 * max(0.1 * timeout, end - time.monotonic()))
    except ClientError as error:
        waits = isinstance(error, DeadlineError) or (isinstance(error, UnavailableError) and BUSY in error.reason)
        if not waits:
            raise
        while (left := end - time.monotonic()) > 0:
            count = sum(max(0, n - before.get(version, 0)) for version, n in client.answered(left).items())
            if count:
                return f"busy, {count} requests were answered meanwhile ({error.reason})"
            time.sleep(min(0.1, left))
        raise


def listens(url: str, protocol: str, timeout: float) -> bool:
    """Whether anything takes connections at an address; what a failed call says depends on protocol and library."""
    from trieton_client.address import Address

    places = Address.parse(url, protocol).places
    for place in places:
        with contextlib.suppress(OSError), socket.create_connection(place, timeout):
            return True
    return not places  # a Unix socket: nothing to find out


def restart(url: str, model: str, root: Path, control_key: str) -> None:
    """Start the versions of `model` that the server holds anew: touch their model.py, then load.

    A load without a change is a no-op for the server that answers 200 (seen), so something has to look new.

    Args:
        control_key: key of the server's model control; empty: the one that lies beside the repository, if any.

    Raises:
        OSError: no such model in the repository, or the server is not there, refuses, or is not ready in time.
    """
    from trieton_builder.rollout.control import ServerControl
    from trieton_builder.rollout.repository import Repository

    repository = Repository(root, model)
    repository.require()
    if not control_key and repository.key_file.is_file():
        control_key = repository.key_file.read_text().strip()
    control = ServerControl(url, repository, key=control_key, load_timeout=120.0)
    try:
        versions = control.ready_versions()  # a dead model still says ready
        if not versions:
            raise OSError(f"{url}: the server holds no version of {model}; publish one")
        for version in versions:
            os.utime(repository.path(version) / "model.py")
        control.load(versions)
        control.wait_ready(versions[-1])
    finally:
        control.close()
