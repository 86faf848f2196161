"""Mixed load on the real server for a long time: does anything grow?

    SOAK_MINUTES=30 .venv/bin/python tests/benchmarks/soak.py [--bundle DIR] [--json FILE]

Unlike requests, bad ones, abandoned ones, over gRPC and HTTP, from a fixed seed. The first sixth of the time (five
minutes of thirty) is warm-up; then resident memory of all the server's processes, its regions in /dev/shm and its open
files may not grow. Exit code 1 when one does. Every 50th answer is compared with the same search in process.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from bench_serving import make_bundle, repository
from rich.console import Console
from rich.table import Table
from trieton.bundle import Bundle
from trieton.search.searcher import Query, QueryError, Searcher
from trieton_builder.server.leftovers import SHM
from trieton_builder.server.process import TritonServer
from trieton_client import Client, DeadlineError, InvalidRequestError

THREADS = 6
SAMPLE_SECONDS = 2.0
MEMORY_GROWTH = 0.02

console = Console(stderr=True, highlight=False)


class Traffic:
    """Callers until `stop`, and what became of their requests."""

    def __init__(self, server: TritonServer, bundle: Path):
        self.server = server
        self.searcher = Searcher(Bundle.open(bundle, verify=False), threads=1)
        self.ids = self.searcher.index.catalog.item_ids
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.counts = {"answered": 0, "refused": 0, "abandoned": 0, "compared": 0, "wrong": 0, "failed": 0}
        self.failures: list[str] = []

    def caller(self, seed: int) -> None:
        """One thread: its own client half the time over HTTP, made anew now and then."""
        rng = random.Random(seed)
        while not self.stop.is_set():
            protocol = rng.choice(["grpc", "http"])
            url = self.server.grpc_url if protocol == "grpc" else self.server.http_url
            with Client(url, protocol, timeout=30) as client:
                for _ in range(500):
                    if self.stop.is_set():
                        return
                    self.one(client, rng, abandon=protocol == "http")

    def one(self, client: Client, rng: random.Random, *, abandon: bool) -> None:
        """One random request. Over gRPC none is abandoned: server 2.51.0 crashes about once in 10,000 deadlines that
        pass while the answer is being sent (triton-inference-server/server issue 7368, fixed in later servers)."""
        options = {
            "history": [int(self.ids[rng.randrange(len(self.ids))]) for _ in range(rng.choice([1, 3, 20, 120]))],
            "num_results": rng.choice([1, 10, 50]),
            "beam_width": rng.choice([50, 64, 100]),
            "exclude": [int(self.ids[rng.randrange(len(self.ids))]) for _ in range(rng.choice([0, 5, 300]))],
        }
        kind = rng.random()
        try:
            if kind < 0.05:
                client.retrieve([-7])
            elif kind < 0.1:
                client.retrieve(**{**options, "num_results": 10_000})
            elif kind < 0.15 and abandon:
                client.retrieve(**options, timeout=0.001)
            elif kind < 0.2:
                client.retrieve([options["history"]] * rng.randrange(2, 40), num_results=5)
            else:
                got = client.retrieve(**options)
                if rng.random() < 0.02:
                    self.compare(options, got.item_ids.tolist(), got.scores)
            self.count("answered")
        except InvalidRequestError:
            self.count("refused")
        except DeadlineError:
            self.count("abandoned")
        except Exception as error:
            self.count("failed")
            self.failures.append(f"{type(error).__name__}: {error}"[:300])

    def compare(self, options: dict, ids: list, scores: np.ndarray) -> None:
        """Against the same search in process; items within a rounding of each other may change places."""
        with self.lock:
            (want,) = self.searcher.search([Query(**options)])
        same = not isinstance(want, QueryError) and len(want.scores) == len(scores)
        if not same or not np.allclose(want.scores, scores, atol=1e-3):
            self.count("wrong")
            self.failures.append(f"{options} gave {ids}")
        self.count("compared")

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1


def sample(server: TritonServer) -> dict[str, float]:
    """Memory, shared memory and open files of the server and its models' processes."""
    processes = [p for p in server.processes() if p.is_running()]
    regions = list(SHM.glob(f"{server.shm_prefix}*"))
    return {
        "memory MB": sum(p.memory_info().rss for p in processes) / 1e6,
        "shared memory MB": sum(r.stat().st_blocks * 512 for r in regions) / 1e6,
        "shared regions": len(regions),
        "open files": sum(map(open_files, processes)),
        "processes": len(processes),
    }


def open_files(process: psutil.Process) -> int:
    """Descriptors of a process without its sockets, which come and go with the callers' connections."""
    count = 0
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            count += not os.readlink(link).startswith("socket:")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="default: an untrained tiny retriever over 100,000 items")
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("SOAK_MINUTES", "30")))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seconds, warm = args.minutes * 60, args.minutes * 10
    bundle = args.bundle or make_bundle("tiny")
    samples: list[tuple[float, dict[str, float]]] = []
    with TritonServer(repository("soak", bundle)) as server:
        traffic = Traffic(server, bundle)
        threads = [threading.Thread(target=traffic.caller, args=(seed,), daemon=True) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        started = time.monotonic()
        with console.status("soaking ...") as status:
            while (age := time.monotonic() - started) < seconds and server.poll() is None:
                try:
                    samples.append((age, sample(server)))
                except psutil.Error as error:
                    traffic.failures.append(f"a process of the server is gone: {error}")
                    break
                status.update(f"{age / 60:.1f} of {args.minutes:g} minutes, {traffic.counts['answered']:,} answers")
                time.sleep(SAMPLE_SECONDS)
        traffic.stop.set()
        for thread in threads:
            thread.join(60)
        ended = server.poll()
    held = [s for age, s in samples if age >= warm]
    fifth = max(1, len(held) // 5)
    table = Table("", "after warm-up", "at the end", "growth", "goal", "met", title=f"soak, {args.minutes:g} minutes")
    ok, figures = ended is None and not traffic.failures and bool(held), dict(traffic.counts)
    for what in held[0] if held else ():
        before = float(np.median([s[what] for s in held[:fifth]]))
        after = float(np.median([s[what] for s in held[-fifth:]]))
        growth = (after - before) / before if before else 0.0
        met = growth <= (MEMORY_GROWTH if what == "memory MB" else 0)
        ok &= met
        figures[what] = after - before
        goal = f"<= {MEMORY_GROWTH:.0%}" if what == "memory MB" else "0"
        table.add_row(what, f"{before:,.1f}", f"{after:,.1f}", f"{growth:+.2%}", goal, "yes" if met else "no")
    out = Console()
    out.print(table)
    out.print(", ".join(f"{count:,} {what}" for what, count in traffic.counts.items()))
    for failure in traffic.failures[:5]:
        out.print(f"[red]{failure}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
