"""What `trieton_client` costs over plain tritonclient: the same searches, asked in turn with both, gRPC and HTTP.

    .venv/bin/python tests/benchmarks/bench_client.py [--bundle DIR] [--calls 2000] [--json FILE]

Both send the same four inputs and read all outputs as arrays; plain tritonclient is used as its own examples do. One
caller, one request in flight, on loopback; who begins changes with every pair. Without --bundle an untrained retriever
over 100,000 random items is served. Also the import, each in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from bench_serving import BEAM_WIDTH, NUM_RESULTS, histories, make_bundle, repository
from rich.console import Console
from rich.table import Table
from trieton_builder.bundle.model_config import MODEL_NAME
from trieton_builder.server.process import TritonServer
from trieton_client import Client

GOAL = 0.05
OUTPUTS = ("item_ids", "scores", "codes", "num_results", "num_unknown", "certified", "bundle_id")
Ask = Callable[[list[int]], Any]


def plain(module: Any, client: Any) -> Ask:
    """A search with plain tritonclient (`tritonclient.grpc` or `tritonclient.http`)."""

    def ask(history: list[int]) -> list[np.ndarray]:
        tensors = []
        for name, ids, dtype in (
            ("history", history, np.int64),
            ("input_ids", [], np.int32),
            ("include_items", [], np.int64),
            ("exclude_items", history, np.int64),
        ):
            array = np.array([ids], dtype)
            tensors.append(module.InferInput(name, array.shape, "INT32" if dtype is np.int32 else "INT64"))
            tensors[-1].set_data_from_numpy(array)
        answer = client.infer(
            MODEL_NAME, tensors, parameters={"num_results": NUM_RESULTS, "beam_width": BEAM_WIDTH}, **options
        )
        return [answer.as_numpy(name) for name in OUTPUTS]

    options = {"client_timeout": 10.0} if module is tritonclient.grpc else {}
    return ask


def ours(client: Client) -> Ask:
    """The same with our client."""
    return lambda history: client.retrieve(history, NUM_RESULTS, beam_width=BEAM_WIDTH, exclude=history)


def in_turn(asks: list[Ask], asked: list[list[int]], calls: int) -> np.ndarray:
    """Milliseconds [calls, len(asks)] of each call; the first tenth is dropped."""
    taken = np.empty((calls, len(asks)))
    for n in range(calls):
        for place in range(len(asks)) if n % 2 else reversed(range(len(asks))):
            started = time.perf_counter()
            asks[place](asked[n % len(asked)])
            taken[n, place] = 1e3 * (time.perf_counter() - started)
    return taken[calls // 10 :]


def import_seconds(statement: str) -> float:
    """Best of five processes."""
    code = f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return min(float(run.stdout) for run in runs)


def measure(bundle: Path, calls: int) -> dict[str, float]:
    asked = histories(bundle)
    figures: dict[str, float] = {}
    with TritonServer(repository("client", bundle)) as server:
        for protocol, module, url in (
            ("gRPC", tritonclient.grpc, server.grpc_url),
            ("HTTP", tritonclient.http, server.http_url),
        ):
            raw = module.InferenceServerClient(url)
            with Client(url, protocol.lower()) as client:
                taken = in_turn([plain(module, raw), ours(client)], asked, calls)
            raw.close()
            theirs, mine = np.median(taken, axis=0)
            figures |= {f"{protocol} plain p50 ms": float(theirs), f"{protocol} ours p50 ms": float(mine)}
            figures[f"{protocol} overhead"] = float(mine / theirs - 1)
    figures["import tritonclient.grpc ms"] = 1e3 * import_seconds("import tritonclient.grpc")
    figures["import trieton_client ms"] = 1e3 * import_seconds("import trieton_client")
    figures["with AsyncClient ms"] = 1e3 * import_seconds("from trieton_client import AsyncClient")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = measure(args.bundle or make_bundle("tiny"), args.calls)
    table = Table("figure", "value", "goal", "met", title="the client beside plain tritonclient")
    for name, value in figures.items():
        if name.endswith("overhead"):
            table.add_row(name, f"{value:+.1%}", f"<= {GOAL:.0%}", "yes" if value <= GOAL else "no")
        else:
            table.add_row(name, f"{value:.3g}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
