"""`trieton publish | rollback | withdraw | versions | prune` and `trieton canary record`."""

from pathlib import Path
from typing import Any

import typer
from rich.padding import Padding
from rich.status import Status
from rich.text import Text

from trieton_builder.cli import app
from trieton_builder.cli.common import CONSTRAINT_HELP, clean_errors, err, out, print_json
from trieton_builder.console import shown

REPOSITORY = typer.Argument(help="Model repository.")
TRITON = typer.Option(
    None,
    "--triton",
    help="gRPC addresses of the servers, HOST:PORT,HOST:PORT,... in the order of their change; HOST:PORT=FOLDER "
    "for one with a repository of its own; `none` tells no server. Default: all that `trieton serve` runs here.",
)
KEY_FILE = typer.Option(
    None, help="File with the control key. Default: $TRIETON_CONTROL_KEY, then control.key beside the repository."
)
WAIT = typer.Option(0.0, min=0, help="Seconds to wait for another publisher to finish.")
TIMEOUT = typer.Option(600.0, min=1, help="Seconds that a server may take to load a version.")
JSON = typer.Option(False, "--json", help="Print the result as JSON on stdout.")
DRY_RUN = typer.Option(False, "--dry-run", help="Say what would be done; change nothing.")

canary_app = typer.Typer(
    help="Requests that a new version must answer before it counts as published.", no_args_is_help=True
)
app.add_typer(canary_app, name="canary")


@app.command()
@clean_errors
def publish(
    bundle: str = typer.Argument(help="Bundle: a folder, or an address that fsspec knows (s3://..., gs://..., ...)."),
    repository: Path = REPOSITORY,
    triton: str | None = TRITON,
    key_file: Path | None = KEY_FILE,
    version: int | None = typer.Option(
        None, min=1, help="Version number, above every one ever used. Default: the next."
    ),
    preflight: bool = typer.Option(True, help="Let a throw-away server load it and answer the canaries first."),
    keep_previous: bool | None = typer.Option(
        None,
        "--keep-previous/--no-keep-previous",
        help="Leave the version before in memory, for a rollback in milliseconds. Default: where memory allows.",
    ),
    canaries: Path | None = typer.Option(
        None,
        exists=True,
        dir_okay=False,
        help="Canary requests. Default: canaries.json beside the repository, or 3 made up.",
    ),
    keep: int | None = typer.Option(None, min=1, help="Afterwards remove all but this many newest versions."),
    allow_dropped_sets: bool = typer.Option(
        False, "--allow-dropped-sets", help="Publish although named sets of the current version are missing."
    ),
    wait: float = WAIT,
    timeout: float = TIMEOUT,
    dry_run: bool = DRY_RUN,
    as_json: bool = JSON,
) -> None:
    """Make a bundle the next version: stage, verify, preflight, one rename, load, canaries; or all as it was before."""
    from trieton_builder.rollout.canary import load_canaries
    from trieton_builder.rollout.publishing import publish as run
    from trieton_builder.rollout.steps import numbers

    with _Display() as display:
        done = run(
            bundle,
            repository,
            servers=_servers(triton),
            control_key=_key(key_file),
            version=version,
            preflight=preflight,
            keep_previous=keep_previous,
            canaries=None if canaries is None else load_canaries(canaries),
            keep=keep,
            allow_dropped_sets=allow_dropped_sets,
            dry_run=dry_run,
            wait=wait,
            load_timeout=timeout,
            listener=display.show,
        )
    if as_json:
        print_json(done.to_json())
    elif done.outcome == "planned":
        print(f"would publish bundle {done.bundle_id} as version {done.version}; nothing was changed")
    else:
        serves = f"serves on {', '.join(done.servers)}"
        placed = "is in place; a server loads it when it starts"
        withdrawn = [f"{numbers(done.withdrawn)} withdrawn, left by a killed publisher"] if done.withdrawn else []
        removed = [f"{numbers(done.removed)} removed"] if done.removed else []
        print(
            f"version {done.version} (bundle {done.bundle_id}) ",
            "; ".join([serves if done.outcome == "serving" else placed, *done.notes, *withdrawn, *removed]),
            sep="",
        )


@app.command()
@clean_errors
def rollback(
    repository: Path = REPOSITORY,
    to: int | None = typer.Option(None, help="Version to go back to. Default: the one before the current."),
    triton: str | None = TRITON,
    key_file: Path | None = KEY_FILE,
    wait: float = WAIT,
    timeout: float = TIMEOUT,
    as_json: bool = JSON,
) -> None:
    """Let an older version answer again; within milliseconds when it is still in memory."""
    from trieton_builder.rollout.retention import rollback as run

    with _Display() as display:
        done = run(
            repository,
            to=to,
            servers=_servers(triton),
            control_key=_key(key_file),
            wait=wait,
            load_timeout=timeout,
            listener=display.show,
        )
    _print_moved(done, as_json)


@app.command()
@clean_errors
def withdraw(
    repository: Path = REPOSITORY,
    version: int = typer.Argument(help="Version to take out; if it is the current one, the one before answers again."),
    triton: str | None = TRITON,
    key_file: Path | None = KEY_FILE,
    wait: float = WAIT,
    timeout: float = TIMEOUT,
    as_json: bool = JSON,
) -> None:
    """Take a version out of the repository, so that it is never served again."""
    from trieton_builder.rollout.retention import withdraw as run

    with _Display() as display:
        done = run(
            repository,
            version,
            servers=_servers(triton),
            control_key=_key(key_file),
            wait=wait,
            load_timeout=timeout,
            listener=display.show,
        )
    _print_moved(done, as_json)


@app.command()
@clean_errors
def versions(
    repository: Path = REPOSITORY,
    triton: str | None = TRITON,
    key_file: Path | None = KEY_FILE,
    as_json: bool = JSON,
) -> None:
    """What was published when, by which command, and what became of it."""
    from trieton_builder.rollout.retention import versions as run

    rows = run(repository, servers=_servers(triton), control_key=_key(key_file))
    if as_json:
        print_json(rows)
        return
    # A command is longer than any terminal is wide: it stands below its version instead of in a column.
    out.print(f"{'version':>7}  {'state':9}  {'bundle':16}  {'items':>13}  published (UTC)", style="bold")
    for row in rows:
        style = {"serving": "green", "current": "green", "failed": "red"}.get(row["state"], "")
        items = f"{row['items']:,}" if "items" in row else ""
        published = row.get("time", "").replace("T", " ")[:16]
        rest = f"  {row.get('bundle_id') or '':16}  {items:>13}  {published}"
        out.print(Text.assemble(f"{row['version']:7}  ", (format(row["state"], "9"), style), rest))
        error = " ".join(row.get("error", "").split())
        last = row.get("last", "publish")
        remark = error[:200] + " ..." * (len(error) > 200) or ("" if last.startswith("publish") else last)
        for text in filter(None, (row.get("command"), remark)):
            out.print(Padding(Text(shown(text), style="dim"), (0, 0, 0, 9)))


@app.command()
@clean_errors
def prune(
    repository: Path = REPOSITORY,
    keep: int = typer.Option(3, min=1, help="How many of the newest versions stay, and how many withdrawn ones."),
    triton: str | None = TRITON,
    key_file: Path | None = KEY_FILE,
    wait: float = WAIT,
    dry_run: bool = DRY_RUN,
    as_json: bool = JSON,
) -> None:
    """Remove old versions; never the current one, nor one that a server holds."""
    from trieton_builder.rollout.retention import prune as run

    with _Display() as display:
        removed = run(
            repository,
            keep=keep,
            servers=_servers(triton),
            control_key=_key(key_file),
            wait=wait,
            dry_run=dry_run,
            listener=display.show,
        )
    if as_json:
        print_json({"removed": removed, "dry_run": dry_run})
    else:
        numbers = ", ".join(map(str, removed)) or "none"
        print(f"would remove: {numbers}" if dry_run else f"removed: {numbers}")


@canary_app.command("record")
@clean_errors
def record(
    repository: Path = REPOSITORY,
    histories: Path | None = typer.Option(
        None,
        exists=True,
        dir_okay=False,
        help="One JSON list of item ids per line. Default: 10 made from the catalogue.",
    ),
    triton: str | None = TRITON,
    num_results: int = typer.Option(10, min=1, help="Items to ask for."),
    constraint: str | None = typer.Option(None, help=f"What every request carries. {CONSTRAINT_HELP}"),
    min_overlap: float = typer.Option(
        0.0, min=0, max=1, help="Share of the items before that a new version must give."
    ),
    max_latency_ratio: float | None = typer.Option(
        None, min=1, help="Latency that a new version may take, as a multiple."
    ),
    output: Path | None = typer.Option(None, help="Default: canaries.json beside the repository, which publish uses."),
    as_json: bool = JSON,
) -> None:
    """Ask the live server and write down what it answers, as what a new version is held to."""
    from trieton_builder.bundle.protected import refuse_inside
    from trieton_builder.rollout import canary
    from trieton_builder.rollout.repository import Repository
    from trieton_builder.rollout.targets import Endpoint, running_servers

    repo = Repository(repository)
    repo.require()
    refuse_inside(output)
    named = _servers(triton)
    running = [Endpoint.parse(named[0]).url] if named else running_servers(repo)
    if not running:
        raise ValueError("no server: name one with --triton HOST:PORT")
    asked = canary.read_histories(histories) if histories else canary.spread_histories(repo.path(repo.current() or 0))
    recorded = canary.record(
        running[0],
        asked,
        num_results=num_results,
        constraint=constraint,
        min_overlap=min_overlap,
        max_latency_ratio=max_latency_ratio,
    )
    path = repo.canary_file if output is None else output
    canary.save_canaries(path, recorded)
    if as_json:
        print_json({"path": str(path), "canaries": len(recorded)})
    else:
        print(f"{len(recorded)} canaries in {path}")


class _Display:
    """Steps on stderr: a spinner for the one under way, one line with its time for each that ended."""

    def __init__(self) -> None:
        self._status: Status | None = None

    def show(self, event: Any) -> None:
        if event.state == "begin":
            self._stop()
            self._status = err.status(f"{event.step}: {event.text}")
            self._status.start()
        elif event.state == "end":
            self._stop()
            err.print(Text("✓", "green"), f"{event.step:10} {event.seconds:7.2f} s  {event.text}")
        elif event.state == "fail":
            self._stop()
            err.print(Text("✗", "red"), f"{event.step:10} {event.seconds:7.2f} s")
        else:
            err.print(f"  {event.text}")

    def _stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> "_Display":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


def _servers(triton: str | None) -> list[str] | None:
    if triton is None:
        return None
    return [] if triton == "none" else [part.strip() for part in triton.split(",") if part.strip()]


def _key(key_file: Path | None) -> str | None:
    from trieton_builder.rollout.targets import read_key

    return None if key_file is None else read_key(key_file)


def _print_moved(done: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(done)
        return
    from trieton_builder.rollout.steps import numbers

    where = f" on {', '.join(done['servers'])}" if done["servers"] else "; a server loads it when it starts"
    gone = f"{numbers(done['withdrawn'])} withdrawn" if done["withdrawn"] else "nothing is withdrawn"
    print(f"{gone}, version {done['to']} (bundle {done['bundle_id']}) answers{where}")
