"""Starts the real server on the demo's bundles, sends it a scenario with Locust, and leaves a report.

    python loadtest/run.py                                     # `make loadtest`: steady, 20 seconds
    python loadtest/run.py --scenario rollout --seconds 300 --swaps 10
    python loadtest/run.py --scenario ramp --users 64 --seconds 60 --workers 2

In --report: report.html, stats.csv and its companions (Locust's own), summary.json, server.log. The exit code says
whether every threshold was met; with `rollout` also whether every publication and rollback went through.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from trieton_builder.cli.common import clean_errors
from trieton_builder.rollout import publish, rollback
from trieton_builder.server.process import TritonServer, choose_ports

LOCUSTFILE = Path(__file__).parent / "locustfile.py"
GRACE = 120.0  # seconds that Locust gets beyond the scenario before it is taken for stuck


@clean_errors
def main(
    scenario: Annotated[str, typer.Option(help="steady, ramp, spike, soak or rollout")] = "steady",
    seconds: Annotated[float, typer.Option(min=2, help="duration of the load")] = 20,
    users: Annotated[int, typer.Option(min=1, help="peak number of users")] = 16,
    bundle: Annotated[
        list[Path] | None,
        typer.Option(help="what to serve: the first at the start, all in turn in a rollout"),
    ] = None,
    histories: Annotated[str, typer.Option(help="see --histories of the locustfile")] = "movielens",
    report: Annotated[Path, typer.Option(help="folder for the reports")] = Path(__file__).parent / "report",
    workers: Annotated[int, typer.Option(min=0, help="Locust processes beside the master; 0 runs one alone")] = 0,
    swaps: Annotated[int, typer.Option(min=1, help="versions published or rolled back in a rollout")] = 10,
    seed: Annotated[int, typer.Option(help="of people, constraints and order")] = 0,
    think_time: Annotated[float, typer.Option(min=0, help="mean seconds a user waits between two requests")] = 0.05,
    max_p99_ms: Annotated[float, typer.Option(help="threshold")] = 1000.0,
    metrics_port: Annotated[int | None, typer.Option(help="where Prometheus may look; default any free one")] = None,
) -> None:
    """Run a scenario against a server of its own; the exit code says whether it held."""
    bundles = bundle or [Path(".demo/bundles/all-films"), Path(".demo/bundles/newest-films")]
    for path in bundles:
        if not path.is_dir():
            raise ValueError(f"{path}: no such bundle; `make demo` makes the default ones, or name yours with --bundle")
    if scenario == "rollout" and len(bundles) < 2:
        raise ValueError("a rollout needs at least two bundles: give --bundle twice")
    report.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trieton-loadtest-") as folder:
        repository = Path(folder) / "repository"
        publish(bundles[0], repository, servers=[], preflight=False)
        server = TritonServer(
            repository,
            ports=(None, None, metrics_port),
            log_path=report / "server.log",
        ).start()
        try:
            options = [
                f"--scenario={scenario}",
                f"--users={users}",
                f"--run-time={seconds:g}s",
                f"--grpc-url={server.grpc_url}",
                f"--http-url={server.http_url}",
                f"--repository={repository}",
                f"--histories={histories}",
                f"--seed={seed}",
                f"--think-time={think_time}",
                f"--max-p99-ms={max_p99_ms}",
                f"--report={report}",
            ]
            swapping = None
            if scenario == "rollout":
                done = Path(folder) / "rollout-done"
                options.append(f"--until={done}")  # no swap without load, however slow the machine
                swapping = Swaps(bundles, repository, server, swaps, seconds, done)
            with locust(options, report, workers) as process:
                if swapping is not None:
                    swapping.start()
                code = _wait(process, seconds + GRACE)
            if swapping is not None:
                problem = swapping.finish()
                print(f"rollout: {swapping.done} of {swaps} swaps done" + (f"; {problem}" if problem else ""))
                code = code or int(problem is not None)
        finally:
            server_code = server.stop()
    print(f"the server ended with exit code {server_code}; report in {report}")
    raise typer.Exit(code or int(server_code != 0))


class Swaps:
    """Publishes bundles in turn and rolls every second publication back, evenly over the run, from a thread."""

    def __init__(
        self, bundles: list[Path], repository: Path, server: TritonServer, swaps: int, seconds: float, done_file: Path
    ):
        self.done = 0
        self._bundles, self._repository, self._swaps = bundles, repository, swaps
        self._server, self._key = server.grpc_url, server.control_key
        self._pause = seconds / (swaps + 1)
        self._end = time.monotonic() + seconds
        self._done_file = done_file
        self._problem: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> str | None:
        """What went wrong, or None. The swap in progress is completed first."""
        self._stop.set()
        self._thread.join(timeout=120)
        if self._thread.is_alive():
            return "a publication did not end within 120 s"
        if self._problem is None and self.done < self._swaps:
            return "the load ended first"
        return self._problem

    def _run(self) -> None:
        try:
            self._swap()
            self._stop.wait(1.0)  # the last version is to answer, too
        finally:
            self._done_file.touch()

    def _swap(self) -> None:
        turn = 0
        while self.done < self._swaps and not self._stop.wait(self._pause):
            started = time.monotonic()
            try:
                if self.done % 3 == 2:
                    rollback(self._repository, servers=[self._server], control_key=self._key)
                else:
                    turn += 1
                    publish(
                        self._bundles[turn % len(self._bundles)],
                        self._repository,
                        servers=[self._server],
                        control_key=self._key,
                        preflight=False,  # its throw-away server would take the cores from the load
                        keep=3,
                    )
            except Exception as error:
                self._problem = f"{type(error).__name__}: {error}"
                return
            self.done += 1
            left = self._end - time.monotonic()
            self._pause = max(0.0, left / (self._swaps - self.done + 1))
            print(f"rollout: swap {self.done} took {time.monotonic() - started:.1f} s", flush=True)


@contextlib.contextmanager
def locust(options: list[str], report: Path, workers: int) -> Iterator[subprocess.Popen[bytes]]:
    """Locust's process that decides (alone, or the master of `workers`); all are ended with the block."""
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *options]
    reports = ["--headless", "--only-summary", f"--html={report / 'report.html'}", f"--csv={report / 'stats'}"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        if workers:
            port = choose_ports((None, None, None))[0]
            master = ["--master", f"--expect-workers={workers}", "--master-bind-host=127.0.0.1"]
            processes.append(_start([*command, *reports, *master, f"--master-bind-port={port}"]))
            worker = ["--worker", "--master-host=127.0.0.1", f"--master-port={port}"]
            processes += [_start([*command, *worker]) for _ in range(workers)]
        else:
            processes.append(_start([*command, *reports]))
        yield processes[0]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    # One core per Locust process is all gevent uses; numeric libraries must not take the server's.
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})


def _wait(process: subprocess.Popen[bytes], timeout: float) -> int:
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise ValueError(f"Locust did not end within {timeout:.0f} s and was stopped") from None


if __name__ == "__main__":
    typer.run(main)
