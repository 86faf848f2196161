"""`trieton serve`: the real server in the foreground."""

import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import Any

import typer

from trieton_builder import interrupts
from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, drop_output, err, fail, out, print_json, reader_has_gone


@app.command()
@clean_errors
def serve(
    repository: Path = typer.Argument(help="Model repository; `trieton publish` fills it, before or while serving."),
    server_options: list[str] = typer.Argument(
        None, help="Further options of the server, behind --, as in: -- --grpc-keepalive-time=60000", show_default=False
    ),
    http_port: int = typer.Option(8000, min=0, max=65535, help="Port of the HTTP endpoint; 0 takes a free one."),
    grpc_port: int = typer.Option(8001, min=0, max=65535, help="Port of the gRPC endpoint; 0 takes a free one."),
    metrics_port: int = typer.Option(
        8002, min=0, max=65535, help="Port of the Prometheus metrics; 0 takes a free one."
    ),
    address: str | None = typer.Option(
        None, help="IP address to listen on. Default: loopback; anything else opens the server to the network."
    ),
    key_file: Path | None = typer.Option(
        None, help="File with the key of the model-control endpoints. Default: control.key beside the repository, made."
    ),
    model_control: str = typer.Option("explicit", help="explicit; or poll: the server watches the repository itself."),
    log: Path | None = typer.Option(
        None, help="File for the server's output. Default: server.log beside the repository, if that may be written."
    ),
    exit_timeout: int = typer.Option(30, min=1, help="Seconds that requests in flight get when the server stops."),
    trace_endpoint: str | None = typer.Option(
        None, help="OpenTelemetry collector (OTLP over HTTP) for requests with a traceparent, as http://localhost:4318."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the addresses as JSON."),
) -> None:
    """Start the server on a repository and stay until Ctrl-C or SIGTERM; then stop it in order.

    A repository that may not be written (a read-only mount) is served as it is.
    """
    from trieton_builder.bundle.protected import refuse_as_repository, refuse_inside
    from trieton_builder.rollout.asked import asked_by
    from trieton_builder.rollout.repository import Repository
    from trieton_builder.rollout.targets import ensure_key, find_key, read_key, remember_server
    from trieton_builder.server.process import TritonServer

    repo = Repository(repository)
    if not repo.root.is_dir():
        raise ValueError(f"model repository {repo.root}: no such folder; trieton publish BUNDLE {repository} makes it")
    refuse_as_repository(repo.root)
    refuse_inside(log)
    key = None if key_file is None else read_key(key_file)
    writable = repo.is_writable()
    if writable:
        repo.prepare()
        _put_right(repo)
        key = key or ensure_key(repo)
        log = log or repo.state / "server.log"
    else:
        with contextlib.suppress(PermissionError):
            key = key or find_key(repo) or None
        err.print(
            f"{repo.state} may not be written here: publishers name this server with --triton"
            + ("" if key else ", and none has the key that it starts with; give it one with --key-file")
        )
    present = repo.versions()
    # Of the version that will answer; going back to another one loads what that one asks.
    asked = {model.name for model in asked_by(repo.path(present[-1]))} if present else set()
    if not present:
        err.print(f"no version in {repo.root} yet; publish one, it will be loaded")
    server = TritonServer(
        repo.root,
        model_control=model_control,
        load=(repo.model, *sorted(asked)) if present else (),
        ports=tuple(port or None for port in (http_port, grpc_port, metrics_port)),  # type: ignore[arg-type]
        address=address,
        control_key=key,
        exit_timeout=exit_timeout,
        trace_endpoint=trace_endpoint,
        log_path=log,
        extra_args=server_options or (),
    )
    # Until the server answers, a signal ends the start as Ctrl-C does; `start` then leaves nothing behind.
    signal.signal(signal.SIGTERM, interrupts.terminate)
    remembered: Path | None = None
    ready = False
    try:
        with err.status("starting ..."):
            server.start()
        ready = True
        if writable:
            remembered = remember_server(repo, server.grpc_url, server.pid)
        addresses = {"http": server.http_url, "grpc": server.grpc_url, "metrics": server.metrics_url, "pid": server.pid}
        try:
            if as_json:
                print_json({**addresses, "version": present[-1] if present else None, "log": str(server.log_path)})
            else:
                out.print("\n".join(f"{name:8} {value}" for name, value in addresses.items()))
            sys.stdout.flush()
        except BrokenPipeError:
            if not reader_has_gone():
                raise
            drop_output()  # nobody wants to know the addresses; the server is for others
        while server.poll() is None:
            time.sleep(0.2)
        fail(f"the server ended with exit code {server.poll()}; its log ends with:\n{server.log_tail()}")
    except KeyboardInterrupt:
        if not ready:
            raise
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with err.status("stopping: requests in flight are answered first ..."):
            code = server.stop()
        raise typer.Exit(code) from None
    finally:
        server.stop()
        if remembered is not None:
            remembered.unlink(missing_ok=True)


def _put_right(repo: Any) -> None:
    """Finish or take back what a killed publisher left, and say which servers run on this repository already."""
    from trieton_builder.rollout.recover import recover
    from trieton_builder.rollout.steps import Steps
    from trieton_builder.rollout.targets import forget_dead_servers, locked, open_targets

    steps = Steps(lambda event: err.print(event.text) if event.state == "note" else None)
    # Other servers on it must go back, too, if the version that they answer from is taken back.
    with open_targets(repo.root, None) as (target,), locked([target], 30, steps):
        forget_dead_servers(repo)
        # A publisher that was killed between rename and canary may have left a version that does not even load.
        recover(target, steps)
        if target.servers:
            others = ", ".join(control.url for control in target.servers)
            err.print(f"{repo.root} is also served on {others}: publish and rollback change all of them, one by one")
