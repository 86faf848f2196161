"""The demo: real people, real films, the real server; one new version under traffic, and back."""

import fcntl
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text
from trieton.bundle import Bundle
from trieton_client import Client, Results

from trieton_builder.bundle.model_config import MODEL_NAME
from trieton_builder.bundle.protected import refuse_as_repository
from trieton_builder.demo.evaluate import ask_everyone, different_from_in_process, quality_table
from trieton_builder.demo.movielens import MovieLens
from trieton_builder.demo.prepare import NEWEST, Prepared, prepare
from trieton_builder.demo.rollover import Traffic
from trieton_builder.demo.stages import Stages
from trieton_builder.demo.train import Recipe
from trieton_builder.rollout import Endpoint, Repository, publish, rollback
from trieton_builder.rollout.targets import running_servers
from trieton_builder.server.installation import check_numpy, find_installation
from trieton_builder.server.process import TritonServer

PEOPLE = (6, 405, 879)  # rows of the three people who are shown
CONSTRAINT = "(comedy or romance) and years_1990s and not children"
SHOWN = 5  # films per list
ROOM = 256 << 20  # bytes that the demo's files take, with some to spare
HISTORY = 4  # last films shown per person


def run_demo(workdir: Path, console: Console, recipe: Recipe) -> None:
    """Make everything in `workdir`, show it, and stop the server. Raises on anything that is not as it must be."""
    repository = Repository(workdir / "repository")
    refuse_as_repository(repository.root)
    workdir.mkdir(parents=True, exist_ok=True)
    with _only_one(workdir, console):
        _run(workdir, repository, Stages(console), recipe)


@contextmanager
def _only_one(workdir: Path, console: Console) -> Iterator[None]:
    """Keep every other demo out of `workdir`; the kernel lets the next one in when this process ends, however it ends.

    Raises:
        ValueError: another one is at work there; names it.
    """
    with os.fdopen(os.open(workdir / ".lock", os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read().strip() or "of another process"
            raise ValueError(
                f"{workdir}: a demo is running there, {holder}; wait for its end, or name another folder with --workdir"
            ) from None
        except OSError as error:  # a network file system; the demo needs no lock to be right when it is alone
            console.print(f"  {workdir}: a second demo in it would not be noticed ({error.strerror})")
        file.truncate()
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def _run(workdir: Path, repository: Repository, stages: Stages, recipe: Recipe) -> None:
    console = stages.console
    _check_before_minutes_of_work(repository)
    prepared = prepare(workdir, stages, recipe)
    for folder in (repository.root, repository.state):
        shutil.rmtree(folder, ignore_errors=True)
    with stages("publish version 1 and start the server"):
        publish(prepared.bundles[0], repository.root)
        server = TritonServer(repository.root, log_path=workdir / "server.log").start()
    try:
        console.print(f"  {MODEL_NAME} on gRPC {server.grpc_url} and HTTP {server.http_url}, process {server.pid}")
        _show_people(prepared, server, console)
        _swap(prepared, server, repository.root, stages)
        _evaluate(prepared, server, stages)
    finally:
        with stages("stop the server"):
            code = server.stop()
    console.print(f"  the server ended with exit code {code}")
    _print_seconds(stages)
    _print_next(workdir, console)


def _check_before_minutes_of_work(repository: Repository) -> None:
    """What would fail only after the training. Raises InstallationError or ValueError."""
    find_installation()
    check_numpy()
    free = shutil.disk_usage(repository.root.parent).free
    if free < ROOM:
        raise ValueError(f"{repository.root.parent}: expected {ROOM >> 20} MiB free on its disk, got {free >> 20}")
    if served := running_servers(repository):
        raise ValueError(
            f"{repository.root}: a server answers from it on {', '.join(served)}; the demo makes it anew: stop that"
        )


def _show_people(prepared: Prepared, server: TritonServer, console: Console) -> None:
    data = prepared.data
    console.print(f"  three people, each asked over gRPC and HTTP; the constraint is: {CONSTRAINT}")
    with Client(server.grpc_url) as grpc, Client(server.http_url, protocol="http") as http:
        for person in PEOPLE:
            seen = data.item_ids[data.histories[person]]
            free, over_http = grpc.retrieve(seen), http.retrieve(seen)
            if not np.array_equal(free.item_ids, over_http.item_ids):
                raise RuntimeError(f"gRPC answered {free.item_ids}, HTTP {over_http.item_ids}")
            new = grpc.retrieve(seen, exclude=seen)
            held = http.retrieve(seen, exclude=seen, constraint=CONSTRAINT)
            console.print(Text(f"\nPerson {data.person_ids[person]}", "bold"), "last watched")
            for film in data.histories[person][-HISTORY:]:
                console.print(f"  {_film(data, film)}")
            lists = {"asked plainly": free, "new to them": new, "new to them, and held to the constraint": held}
            # Columns flow below each other where the terminal is narrow.
            console.print(Columns(_list(data, heading, results) for heading, results in lists.items()))


def _film(data: MovieLens, row: int) -> str:
    return f"{data.titles[row]} ({data.years[row] or '?'})"


def _list(data: MovieLens, heading: str, results: Results) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    table.add_column(heading, width=40, no_wrap=True)
    table.add_column("score", justify="right")
    for item, score in list(results)[:SHOWN]:
        table.add_row(_film(data, int(np.searchsorted(data.item_ids, item))), f"{score:.2f}")
    return table


def _swap(prepared: Prepared, server: TritonServer, repository: Path, stages: Stages) -> None:
    """Publish version 2 and roll back while a client keeps asking; check every answer it got."""
    data, console = prepared.data, stages.console
    first, second = (Bundle.open(path, verify=False).bundle_id for path in prepared.bundles)
    endpoint = Endpoint(server.grpc_url, control_key=server.control_key)
    console.print()
    with Traffic(server.grpc_url, [data.item_ids[history] for history in data.histories]) as traffic:
        traffic.wait_for(first)
        with stages("publish version 2 (only the newest films) under traffic"):
            publish(prepared.bundles[1], repository, servers=[endpoint])
            traffic.wait_for(second)
        before = traffic.bundles[first]
        with stages("roll back to version 1 under traffic"):
            rollback(repository, servers=[endpoint])
            traffic.wait_for(first, answers=before + 20)
    newest = set(data.item_ids[data.sets()[NEWEST]].tolist())
    stale = len(traffic.returned[second] - newest)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for heading in ("bundle that answered", "answers", "different films", "of them older than allowed"):
        table.add_column(heading)
    for bundle_id, count in traffic.bundles.items():
        films = traffic.returned[bundle_id]
        older = str(stale) if bundle_id == second else "all are allowed"
        table.add_row(bundle_id, str(count), str(len(films)), older)
    console.print(table)
    console.print(
        f"  {traffic.answered} answers, {len(traffic.failures)} failed, slowest {traffic.slowest * 1e3:.0f} ms"
    )
    if traffic.failures or stale or set(traffic.bundles) != {first, second}:
        raise RuntimeError(f"the swap was not clean: {traffic.failures[:3]}, {stale} films that version 2 forbids")


def _evaluate(prepared: Prepared, server: TritonServer, stages: Stages) -> None:
    bundle = Bundle.open(prepared.bundles[0], verify=False)
    with stages("ask the server for every test person") as progress:
        served = ask_everyone(server.grpc_url, prepared, progress)
    with stages("the same search in process, and the alternatives") as progress:
        different = different_from_in_process(served, bundle, prepared.data, progress)
        table = quality_table(prepared, served, bundle, progress)
    stages.console.print()
    stages.console.print(table)
    stages.console.print(f"  people whose served films differ from the same search in process: {different}")
    if different or served.invalid:
        raise RuntimeError(
            f"{different} people were served other films than the search gives, {served.invalid} invalid"
        )


def _print_next(workdir: Path, console: Console) -> None:
    """Commands that go on from here, as they run in this folder."""
    program = os.path.relpath(Path(sys.prefix) / "bin" / "trieton")
    folder = shlex.quote(os.path.relpath(workdir))
    console.print("\nNow serve what was made here, and in a second terminal ask it:\n")
    for arguments in (
        f"serve {folder}/repository",
        'query 50 172 181 210 --constraint "drama and newest"',
        f"explain 50 172 181 --bundle {folder}/bundles/all-films",
    ):
        console.print(f"  {program} {arguments}")


def _print_seconds(stages: Stages) -> None:
    table = Table(title="Seconds", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    for title, seconds in stages.seconds.items():
        table.add_row(title, f"{seconds:.1f}")
    table.add_row("all", f"{sum(stages.seconds.values()):.1f}", style="bold")
    stages.console.print()
    stages.console.print(table)
