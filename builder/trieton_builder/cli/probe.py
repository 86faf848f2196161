"""`trieton probe`: does the model really answer? The server's own health endpoints cannot tell.

When the model's process dies, server and model go on saying that they are ready while every request fails, and nothing
restarts it (seen on 2.51.0). A real search finds that out.
"""

import os
import socket
from pathlib import Path

import typer

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, fail, out
from trieton_builder.cli.query import MODEL, PROTOCOL, URL

BUSY = "queue size"  # what the server says when its queue is full


@app.command()
@clean_errors
def probe(
    url: str = URL,
    protocol: str = PROTOCOL,
    model: str = MODEL,
    timeout: float = typer.Option(2.0, "--timeout", "-t", min=0.001, help="Seconds until no answer is an answer."),
    live: bool = typer.Option(False, help="For liveness: a full queue is a sign of life, not of death."),
    revive: Path | None = typer.Option(
        None, help="On failure, start the model anew; needs the server's model repository (gRPC only)."
    ),
    control_key: str = typer.Option("", envvar="TRIETON_CONTROL_KEY", help="Key of the server's model control."),
) -> None:
    """Send one small search and exit with 0 if it was answered, else with 1.

    The search takes one token, one beam and one result: it goes through queue, process, model, index and back, and
    needs no item of the catalogue.
    """
    from trieton_client import Client, ClientError, InvalidRequestError, NotFoundError, UnavailableError

    with Client(url, protocol, model=model, timeout=timeout, retries=0) as client:
        try:
            results = client.retrieve(input_ids=[0], num_results=1, beam_width=1)
        except ClientError as error:
            if live and isinstance(error, UnavailableError) and BUSY in error.reason:
                out.print(f"alive: {url}: {error.reason}")
                return
            if not listens(url, timeout):
                fail(f"{error}; no server listens there: trieton serve REPOSITORY starts one, --url names another")
            if isinstance(error, NotFoundError):
                fail(f"{error}; trieton publish BUNDLE REPOSITORY loads one, --model names another")
            if isinstance(error, InvalidRequestError):
                fail(str(error))
            if revive is None:
                fail(f"{error}; restart the server, or: trieton probe --url {url} --revive REPOSITORY")
            failure = error
        else:
            out.print(f"ok: {url}: bundle {results.bundle_id}, version {results.model_version}")
            return
    restart(url, model, revive, control_key)
    with Client(url, protocol, model=model, timeout=timeout, retries=0) as client:
        results = client.retrieve(input_ids=[0], num_results=1, beam_width=1)
    out.print(f"revived: {url}: bundle {results.bundle_id}, version {results.model_version} (it was: {failure.reason})")


def listens(url: str, timeout: float) -> bool:
    """Whether anything takes connections at host:port; what a failed call says depends on protocol and library."""
    host, _, port = url.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout):
            return True
    except (OSError, ValueError):
        return False


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
