"""Rollout under load: 10 publishes and 5 rollbacks with 32 clients, a publish at 1e7 items, 50 publishes in a row.

    .venv/bin/python tests/benchmarks/bench_rollout.py [--items 1_000_000] [--large 10_000_000] [--publishes 10]
        [--soak 50] [--json FILE]

Clients and server share this machine's cores. Latency counts from the moment a request was due, so a client that waits
for an answer does not hide the requests it could not send. Work files lie in .bench/rollout.
"""

import argparse
import json
import multiprocessing
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from trieton.bundle import Bundle
from trieton.search.searcher import Query, Searcher
from trieton_builder.bundle.model_config import MODEL_NAME, render_config
from trieton_builder.bundle.write import write_bundle
from trieton_builder.indexing.trie import build_index
from trieton_builder.rollout import Endpoint, Repository, publish, rollback
from trieton_builder.rollout.control import ServerControl
from trieton_builder.server.leftovers import SHM
from trieton_builder.server.process import TritonServer
from trieton_client import Client, ClientError

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".bench" / "rollout"
SIZES = (250, 250, 250, 250)
NUM_HISTORIES = 64
CLIENTS, PROCESSES = 32, 2
TOLERANCE = 1e-3  # of a score: sums in another order, because other requests shared the batch
AFTER = 1.0  # seconds behind READY that still count as part of the swap: the old version drains

sys.path.insert(0, str(ROOT / "tests"))
from tiny_retriever import export_tiny_graphs, tiny_retriever  # noqa: E402

console = Console(stderr=True, highlight=False)


def make_bundle(name: str, num_items: int, seed: int) -> Path:
    """A bundle of `num_items` random semantic IDs over the same untrained retriever; kept between runs."""
    folder = WORK / f"{name}-{num_items}-{seed}"
    if folder.exists():
        return folder
    WORK.mkdir(parents=True, exist_ok=True)
    graphs = WORK / "graphs"
    if not graphs.exists():
        export_tiny_graphs(graphs)
    retriever = WORK / f"retriever-{len(SIZES)}-{SIZES[0]}"
    if not retriever.exists():
        tiny_retriever(graphs, retriever, SIZES)
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, SIZES[0], (num_items, len(SIZES)), np.int32)
    index = build_index(codes, codebook_sizes=SIZES, item_ids=np.arange(1, num_items + 1))
    write_bundle(folder, index=index, retriever_dir=retriever)
    return folder


def histories(num_items: int) -> list[list[int]]:
    rng = np.random.default_rng(9)
    return [rng.integers(1, num_items + 1, length).tolist() for length in rng.integers(1, 11, NUM_HISTORIES)]


def expected(bundle: Path, asked: list[list[int]]) -> list[dict[int, float]]:
    """{item: score} per history of what the server's default beam and a five times wider one find.

    Any returned item must be one of them, with that score: another batch may change the last digits of a score, and so
    who is the last to stay in the beam.
    """
    searcher = Searcher(Bundle.open(bundle))
    found: list[dict[int, float]] = [{} for _ in asked]
    for width in (20, 100):
        answers = searcher.search([Query(one, num_results=width, beam_width=width) for one in asked])
        for scores, answer in zip(found, answers, strict=True):
            scores.update(zip(answer.item_ids.tolist(), answer.scores.tolist(), strict=True))
    return found


class Worker:
    """One process of clients. Asks at a fixed rate, or as fast as answers come when `rate` is 0."""

    def __init__(self, url, known, asked, rate, stop, results):
        self.url, self.known, self.asked, self.rate = url, known, asked, rate
        self.stop, self.results = stop, results
        self.rows: list[tuple[float, float, str]] = []  # due, seconds, bundle id or "!reason"

    def run(self) -> None:
        count = CLIENTS // PROCESSES
        with Client(self.url, retries=0, timeout=30) as client:
            threads = [threading.Thread(target=self._ask, args=(client, n, count)) for n in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.results.put(self.rows)

    def _ask(self, client: Client, number: int, count: int) -> None:
        pause = count / self.rate if self.rate else 0.0
        due = time.monotonic() + pause * number / count
        turn = number
        while not self.stop.is_set():
            if pause:
                time.sleep(max(0.0, due - time.monotonic()))
            else:
                due = time.monotonic()
            which = turn % len(self.asked)
            try:
                results = client.retrieve(self.asked[which])
                verdict = results.bundle_id if self._right(results, which) else f"!wrong answer of {results.bundle_id}"
            except ClientError as error:
                verdict = f"!{error}"
            self.rows.append((due, time.monotonic() - due, verdict))
            due += pause
            turn += 1

    def _right(self, results, which: int) -> bool:
        known = self.known.get(results.bundle_id)
        return (
            known is not None
            and results.num_results == 10
            and all(abs(known[which].get(item, np.inf) - score) <= TOLERANCE for item, score in results)
        )


def run_worker(*arguments) -> None:
    Worker(*arguments).run()


class Traffic:
    """PROCESSES worker processes until the block ends; then `.rows`."""

    def __init__(self, url, known, asked, rate):
        spawn = multiprocessing.get_context("spawn")
        self.stop, self.queue = spawn.Event(), spawn.Queue()
        arguments = (url, known, asked, rate / PROCESSES, self.stop, self.queue)
        self.processes = [spawn.Process(target=run_worker, args=arguments) for _ in range(PROCESSES)]

    def __enter__(self):
        for process in self.processes:
            process.start()
        time.sleep(3)  # imports and connections
        self.began = time.monotonic()
        return self

    def __exit__(self, *_):
        ended = time.monotonic()
        self.stop.set()
        rows = [row for _ in self.processes for row in self.queue.get(timeout=60)]
        for process in self.processes:
            process.join()
        self.rows = [row for row in rows if self.began <= row[0] <= ended]
        self.seconds = ended - self.began


def p99_ms(seconds: list[float]) -> float:
    return 1e3 * float(np.percentile(seconds, 99)) if seconds else float("nan")


def measure_swaps(num_items: int, publishes: int) -> dict[str, object]:
    bundles = [make_bundle("swap", num_items, seed) for seed in (0, 1)]
    asked = histories(num_items)
    known = {Bundle.open(bundle).bundle_id: expected(bundle, asked) for bundle in bundles}
    root = fresh_repository("models")
    publish(bundles[0], root, servers=[], preflight=False)
    marks: list[tuple[str, str, float]] = []
    with TritonServer(root, exit_timeout=5) as server:
        servers = [Endpoint(server.grpc_url, server.control_key)]
        with Traffic(server.grpc_url, known, asked, 0) as closed:
            time.sleep(10)
        saturating = len(closed.rows) / closed.seconds
        console.print(f"saturating rate {saturating:.0f}/s; now half of it")
        back_seconds = []
        with Traffic(server.grpc_url, known, asked, saturating / 2) as traffic:
            time.sleep(15)
            quiet = [(traffic.began, time.monotonic())]
            for number in range(1, publishes + 1):
                done = publish(
                    bundles[number % 2],
                    root,
                    servers=servers,
                    keep=3,
                    listener=lambda event: marks.append((event.step, event.state, time.monotonic())),
                )
                time.sleep(3)
                if number % 2 == 0:
                    back_seconds.append(time_rollback(root, server, Repository(root).bundle_id(done.previous)))
                    time.sleep(2)
                    # The next publish must bring the other bundle again.
                    publish(bundles[0], root, servers=servers, preflight=False)
                    time.sleep(2)
            quiet.append((time.monotonic(), time.monotonic() + 15))
            time.sleep(15)
    loads = [at for step, state, at in marks if (step, state) == ("load", "begin")]
    readies = [at for step, state, at in marks if (step, state) == ("ready", "end")]
    swaps = list(zip(loads, readies, strict=True))
    trials = list(
        zip(
            [at for step, state, at in marks if (step, state) == ("preflight", "begin")],
            [at for step, state, at in marks if (step, state) == ("preflight", "end")],
            strict=True,
        )
    )
    good = [row for row in traffic.rows if not row[2].startswith("!")]
    in_swap = [s for due, s, _ in good if any(b <= due <= e + AFTER for b, e in swaps)]
    in_trial = [s for due, s, _ in good if any(b <= due <= e for b, e in trials)]
    steady = [s for due, s, _ in good if any(b <= due <= e for b, e in quiet)]
    bad = [row[2] for row in [*traffic.rows, *closed.rows] if row[2].startswith("!")]
    for text in sorted(set(bad))[:5]:
        console.print(f"[red]{text}[/]")
    return {
        "items": num_items,
        "answers": len(traffic.rows) + len(closed.rows),
        "failed or wrong answers": len(bad),
        "answers of unknown or mixed bundles": sum("wrong answer" in text for text in bad),
        "saturating rate, 1/s": round(saturating),
        "steady p50, ms": round(1e3 * float(np.median(steady)), 2),
        "steady p99, ms": round(p99_ms(steady), 2),
        "p99 during a swap, ms": round(p99_ms(in_swap), 2),
        "p99 during a swap / steady p99": round(p99_ms(in_swap) / p99_ms(steady), 2),
        "p99 during the preflight / steady p99": round(p99_ms(in_trial) / p99_ms(steady), 2),
        "load to READY, s": round(float(np.median([e - b for b, e in swaps])), 2),
        "warm rollback, command to first answer, s": [round(s, 2) for s in back_seconds],
    }


def time_rollback(root: Path, server: TritonServer, target: str) -> float:
    """Seconds from the start of the command to the first answer of the bundle it goes back to."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "trieton_builder", "rollback", str(root), "--triton", server.grpc_url]
    environment = {"TRIETON_CONTROL_KEY": server.control_key, "PATH": "/usr/bin:/bin"}
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running,
        Client(server.grpc_url, retries=0) as client,
    ):
        while client.retrieve([1]).bundle_id != target:
            if time.monotonic() - begin > 60:
                raise TimeoutError(f"bundle {target} does not answer")
            time.sleep(0.002)
        seconds = time.monotonic() - begin
        if running.wait(60) != 0:
            raise RuntimeError("the rollback command failed")
    return seconds


def measure_large(num_items: int) -> dict[str, object]:
    bundles = [make_bundle("large", num_items, seed) for seed in (0, 1)]
    root = fresh_repository("large")
    publish(bundles[0], root, servers=[], preflight=False)
    with TritonServer(root, exit_timeout=5, start_timeout=300) as server:
        servers = [Endpoint(server.grpc_url, server.control_key)]
        begin = time.monotonic()
        done = publish(bundles[1], root, servers=servers)
        seconds = time.monotonic() - begin
        begin = time.monotonic()
        rollback(root, servers=servers)
        back = time.monotonic() - begin
    size = sum(path.stat().st_size for path in bundles[1].rglob("*") if path.is_file())
    return {
        "items": num_items,
        "bundle, MB": round(size / 1e6),
        "publish, s": round(seconds, 2),
        "of which": {step["step"]: step["seconds"] for step in done.steps if step.get("seconds", 0) >= 0.01},
        "warm rollback in process, s": round(back, 3),
    }


def measure_soak(count: int) -> dict[str, object]:
    bundles = [make_bundle("soak", 1000, seed) for seed in (0, 1)]
    root = fresh_repository("soak")
    (root / MODEL_NAME / "config.pbtxt").write_text(render_config(max_batch_size=4))
    publish(bundles[0], root, servers=[], preflight=False)
    repository = Repository(root)
    with TritonServer(root, exit_timeout=5) as server:
        control = ServerControl(server.grpc_url, repository, key=server.control_key)

        def figures() -> dict[str, int]:
            control.load([repository.current()])
            deadline = time.monotonic() + 30
            while len(server.processes()) != 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(1)
            regions = list(SHM.glob(f"{server.shm_prefix}*"))
            main, *stubs = server.processes()
            return {
                "memory": sum(process.memory_info().rss for process in (main, *stubs)),
                "memory of the server's own process": main.memory_info().rss,
                "shared memory": sum(path.stat().st_size for path in regions),
                "descriptors": main.num_fds(),
                "processes": 1 + len(stubs),
            }

        servers = [Endpoint(server.grpc_url, server.control_key)]
        seconds = []
        before: dict[str, int] = {}
        with Client(server.grpc_url) as client:
            for number in range(1, count + 6):
                begin = time.monotonic()
                done = publish(bundles[number % 2], root, servers=servers, preflight=False, keep=3)
                seconds.append(time.monotonic() - begin)
                assert client.retrieve([1]).bundle_id == done.bundle_id
                if number == 5:  # the first ones fill pools of the allocator
                    before = figures()
        after = figures()
        control.close()
    growth = {name: f"{before[name]:,} -> {after[name]:,} ({after[name] / before[name] - 1:+.1%})" for name in before}
    return {
        "publishes": count,
        "median publish, s": round(float(np.median(seconds)), 2),
        **growth,
        "versions kept": len(repository.versions()),
    }


def fresh_repository(name: str) -> Path:
    root = WORK / name
    for folder in (root, WORK / f"{name}.rollout"):
        shutil.rmtree(folder, ignore_errors=True)
    (root / MODEL_NAME).mkdir(parents=True)
    (root / MODEL_NAME / "config.pbtxt").write_text(render_config())
    return root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000, help="index of the swaps under load; 0 leaves them out")
    parser.add_argument(
        "--publishes", type=int, default=10, help="publishes under load; every second one is rolled back"
    )
    parser.add_argument("--large", type=int, default=10_000_000, help="index of the timed publish; 0 leaves it out")
    parser.add_argument("--soak", type=int, default=50, help="publishes in a row; 0 leaves them out")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    if arguments.items:
        results["swaps under load, 32 clients"] = measure_swaps(arguments.items, arguments.publishes)
    if arguments.large:
        results["index-only change"] = measure_large(arguments.large)
    if arguments.soak:
        results["publishes in a row"] = measure_soak(arguments.soak)
    for title, figures in results.items():
        table = Table("", "", title=title, title_justify="left", show_header=False)
        for name, value in figures.items():
            table.add_row(name, str(value))
        Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
