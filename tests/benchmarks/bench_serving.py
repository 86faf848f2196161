"""The served model on the real server: latency, throughput, batching, and the same model served with `generate`.

    .venv/bin/python tests/benchmarks/bench_serving.py [--bundle DIR ...] [--seconds 8] [--no-peer] [--memory]
        [--json FILE]

Server, client and the in-process search share this machine's cores. Without --bundle two untrained retrievers are made:
`tiny` (the size of a test) and `20M` (about 20 million parameters), over 100,000 random items. Files lie in
.bench/serving.
"""

import argparse
import asyncio
import json
import multiprocessing
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from trieton.bundle import Bundle
from trieton.search.searcher import Query, QueryError, Searcher
from trieton_builder.bundle.bls import write_bls_retriever, write_graph_models
from trieton_builder.bundle.model_config import MODEL_NAME, render_config
from trieton_builder.bundle.write import write_bundle
from trieton_builder.indexing.trie import build_index
from trieton_builder.server.process import TritonServer
from trieton_client import AsyncClient, Client

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".bench" / "serving"
SIZES = (256, 256, 256)
FIRST_TOKEN = 3
NUM_ITEMS = 100_000
CLIENTS = 32
NUM_RESULTS, BEAM_WIDTH = 10, 20

console = Console(stderr=True, highlight=False)


# ---- models


def t5(size: str) -> Any:
    """An untrained T5: `tiny`, or `20M`."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    shape = {
        "tiny": {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 2, "num_heads": 4},
        "20M": {"d_model": 384, "d_kv": 64, "d_ff": 1536, "num_layers": 5, "num_heads": 6},
    }[size]
    config = T5Config(vocab_size=1024, decoder_start_token_id=0, initializer_factor=1.5, **shape)
    return T5ForConditionalGeneration(config).eval()


def make_bundle(size: str, num_items: int = NUM_ITEMS, levels: int = len(SIZES)) -> Path:
    """A bundle of an untrained retriever and random items, kept between runs; item ids are row numbers."""
    folder = WORK / f"{size}-{num_items}-{levels}"
    if (folder / "manifest.json").exists():
        return folder
    from trieton.retriever.session import PromptTemplate, TokenMap
    from trieton_builder.export import export_retriever

    WORK.mkdir(parents=True, exist_ok=True)
    sizes = SIZES[:1] * levels if levels == len(SIZES) else (120,) * levels
    retriever = WORK / f"retriever-{size}-{levels}"
    if not retriever.exists():
        prompt = PromptTemplate(TokenMap.contiguous(sizes, first=FIRST_TOKEN), max_items=20)
        export_retriever(t5(size), retriever, prompt)
    codes = random_codes(num_items, sizes)
    write_bundle(folder, index=build_index(codes, codebook_sizes=sizes), retriever_dir=retriever)
    return folder


def random_codes(num_items: int, sizes: tuple[int, ...]) -> np.ndarray:
    """int32 [num_items, levels]."""
    return np.random.default_rng(0).integers(0, sizes, (num_items, len(sizes)), np.int32)


def repository(name: str, bundle: Path, **options: Any) -> Path:
    """A fresh model repository that serves `bundle`."""
    root = WORK / f"repository-{name}"
    shutil.rmtree(root, ignore_errors=True)
    model = root / MODEL_NAME
    model.mkdir(parents=True)
    model.joinpath("config.pbtxt").write_text(render_config(**options))
    shutil.copytree(bundle, model / "1")
    return root


def peer_repository(size: str) -> Path:
    """The same weights behind `peer_generate.py`."""
    root = WORK / "repository-peer"
    shutil.rmtree(root, ignore_errors=True)
    version = root / "peer" / "1"
    version.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("peer_generate.py"), version / "model.py")
    t5(size).save_pretrained(version / "model")
    np.save(version / "codes.npy", random_codes(NUM_ITEMS, SIZES))
    starts = [FIRST_TOKEN + sum(SIZES[:level]) for level in range(len(SIZES))]
    spec = {"num_results": NUM_RESULTS, "beam_width": BEAM_WIDTH, "starts": starts}
    (version / "peer.json").write_text(json.dumps(spec))
    config = """name: "peer" backend: "python" max_batch_size: 32 dynamic_batching { }
input [ { name: "history" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true } ]
output [ { name: "item_ids" data_type: TYPE_INT64 dims: [ -1 ] }, { name: "scores" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
    (root / "peer" / "config.pbtxt").write_text(config)
    return root


# ---- load


def histories(bundle: Path | None, count: int = 256) -> list[list[int]]:
    """Histories of 5 to 20 items, fixed seed."""
    rng = np.random.default_rng(1)
    ids = Bundle.open(bundle, verify=False).index.catalog.item_ids if bundle else np.arange(NUM_ITEMS)
    return [rng.choice(ids, n).tolist() for n in rng.integers(5, 21, count).tolist()]


def load(url: str, asked: list[list[int]], seconds: float, peer: bool, pipe: Any) -> None:
    """`CLIENTS` callers with one request in flight each, in a process of its own; sends (answers/s, latencies)."""

    async def main() -> tuple[int, list[float]]:
        import tritonclient.grpc.aio as triton

        latencies: list[float] = []
        raw = triton.InferenceServerClient(url)
        async with AsyncClient(url, timeout=60) as client:

            async def ask(n: int) -> None:
                history = asked[n % len(asked)]
                if not peer:
                    await client.retrieve(history, NUM_RESULTS, beam_width=BEAM_WIDTH)
                    return
                array = np.array([history])
                await raw.infer("peer", [triton.InferInput("history", array.shape, "INT64").set_data_from_numpy(array)])

            async def caller(place: int, end: float) -> None:
                n = place
                while time.perf_counter() < end:
                    started = time.perf_counter()
                    await ask(n)
                    latencies.append(time.perf_counter() - started)
                    n += CLIENTS

            await asyncio.gather(*(caller(i, time.perf_counter() + seconds / 4) for i in range(CLIENTS)))
            latencies.clear()
            started = time.perf_counter()
            await asyncio.gather(*(caller(i, started + seconds) for i in range(CLIENTS)))
            elapsed = time.perf_counter() - started
        await raw.close()
        return len(latencies) / elapsed, latencies

    pipe.send(asyncio.run(main()))


def throughput(url: str, asked: list[list[int]], seconds: float, *, peer: bool = False) -> dict[str, float]:
    """Answers per second and latencies of `CLIENTS` clients."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=load, args=(url, asked, seconds, peer, theirs), daemon=True)
    process.start()
    if not mine.poll(seconds * 2 + 120):
        raise TimeoutError("the load generator did not report")
    rate, latencies = mine.recv()
    process.join(10)
    return {"rate": rate, "p50": 1e3 * float(np.median(latencies)), "p99": 1e3 * float(np.percentile(latencies, 99))}


def one_at_a_time(ask: Any, asked: list[list[int]], seconds: float) -> np.ndarray:
    """Milliseconds of each call, the first tenth dropped."""
    taken, end, n = [], time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        started = time.perf_counter()
        ask(asked[n % len(asked)])
        taken.append(1e3 * (time.perf_counter() - started))
        n += 1
    return np.array(taken[len(taken) // 10 :])


def best_batch(searcher: Searcher, asked: list[list[int]], seconds: float) -> tuple[float, int, float]:
    """Queries per second and batch size of the best batch size in process, and queries per second one by one."""
    rates = {}
    for size in (1, 4, 8, 16, 32):
        batch = [Query(np.array(h), num_results=NUM_RESULTS, beam_width=BEAM_WIDTH) for h in asked[:size]]
        searcher.search(batch)
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds / 4:
            if any(isinstance(entry, QueryError) for entry in searcher.search(batch)):
                raise RuntimeError("a search failed")
            count += size
        rates[size] = count / (time.perf_counter() - started)
    best = max(rates, key=lambda size: rates[size])
    return rates[best], best, rates[1]


# ---- the figures


def measure(name: str, bundle: Path, seconds: float) -> dict[str, float]:
    """All figures of one bundle."""
    asked = histories(bundle)
    figures: dict[str, float] = {}
    searcher = Searcher(Bundle.open(bundle, verify=False))
    searcher.warm_up(32)
    with TritonServer(repository(name, bundle)) as server, Client(server.grpc_url) as client:
        # Turn about, so that both see the same machine.
        inside, outside = [], []
        for _ in range(4):
            outside.append(
                one_at_a_time(lambda h: client.retrieve(h, NUM_RESULTS, beam_width=BEAM_WIDTH), asked, seconds / 8)
            )
            inside.append(
                one_at_a_time(
                    lambda h: searcher.search([Query(np.array(h), num_results=NUM_RESULTS, beam_width=BEAM_WIDTH)]),
                    asked,
                    seconds / 8,
                )
            )
        figures["grpc p50 ms"] = float(np.median(np.concatenate(outside)))
        figures["grpc p99 ms"] = float(np.percentile(np.concatenate(outside), 99))
        figures["in process p50 ms"] = float(np.median(np.concatenate(inside)))
        figures["in process /s"], figures["best batch"], figures["in process one by one /s"] = best_batch(
            searcher, asked, seconds
        )
        served = throughput(server.grpc_url, asked, seconds)
        figures |= {"served /s": served["rate"], "served p50 ms": served["p50"], "served p99 ms": served["p99"]}
    with TritonServer(repository(name, bundle, max_batch_size=1)) as server:
        figures["served without batching /s"] = throughput(server.grpc_url, asked, seconds)["rate"]
    return figures


def measure_bls(size: str, bundle: Path, seconds: float) -> dict[str, float]:
    """One request at a time with the retriever as two models of the server."""
    asked = histories(bundle)
    retriever, parts = WORK / f"retriever-{size}-{len(SIZES)}", WORK / f"bls-{size}"
    shutil.rmtree(parts, ignore_errors=True)
    write_bls_retriever(retriever, parts / "retriever")
    write_bundle(parts / "bundle", index=Bundle.open(bundle).index, retriever_dir=parts / "retriever")
    root = repository("bls", parts / "bundle")
    write_graph_models(retriever, root, backend="python")
    models = ("retriever_prefill", "retriever_decode", MODEL_NAME)
    with TritonServer(root, load=models) as server, Client(server.grpc_url) as client:
        taken = one_at_a_time(lambda h: client.retrieve(h, NUM_RESULTS, beam_width=BEAM_WIDTH), asked, seconds / 2)
    return {"bls p50 ms": float(np.median(taken))}


def measure_peer(size: str, seconds: float) -> dict[str, float]:
    """The same weights served with `generate`."""
    asked = histories(None)
    with TritonServer(peer_repository(size), load=("peer",)) as server:
        served = throughput(server.grpc_url, asked, seconds, peer=True)
    return {"peer /s": served["rate"], "peer p50 ms": served["p50"], "peer p99 ms": served["p99"]}


def measure_memory(num_items: int) -> dict[str, float]:
    """Proportional memory of the model's processes in MB: one and two instances, a large and a small index."""
    bundle = make_bundle("tiny", num_items, 8)
    figures = {
        "index and items": sum((bundle / f).stat().st_size for f in ("index.safetensors", "catalog.safetensors")) / 1e6
    }
    for name, path in (("", bundle), (", small index", make_bundle("tiny", NUM_ITEMS, 8))):
        asked = histories(path, 64)
        for instances in (1, 2):
            with (
                TritonServer(repository("memory", path, instances=instances), start_timeout=300) as server,
                Client(server.grpc_url) as client,
            ):
                for history in asked * 4:
                    client.retrieve(history)
                stubs = [p for p in server.processes() if "stub" in p.name()]
                figures[f"{instances} instance(s){name}"] = sum(p.memory_full_info().pss for p in stubs) / 1e6
    return figures


def row(table: Table, what: str, value: float, goal: str = "", met: bool | None = None) -> None:
    """One line of the printed table."""
    mark = "" if met is None else ("[green]yes[/]" if met else "[red]no[/]")
    table.add_row(what, f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}", goal, mark)


def show(name: str, f: dict[str, float]) -> None:
    """Print the figures of one bundle beside their goals."""
    table = Table(title=f"serving: {name}, gRPC on loopback, {CLIENTS} clients")
    for column in ("figure", "value", "goal", "met"):
        table.add_column(column, justify="left" if column in ("figure", "goal") else "right")
    above = f["grpc p50 ms"] - f["in process p50 ms"]
    row(table, "one request over gRPC, p50 ms", f["grpc p50 ms"])
    row(table, "one request over gRPC, p99 ms", f["grpc p99 ms"])
    row(table, "the same search in process, p50 ms", f["in process p50 ms"])
    row(table, "p50 above the search in process, ms", above, "<= 1.0", above <= 1.0)
    row(table, f"in process, best batch ({f['best batch']:.0f}), queries/s", f["in process /s"])
    row(table, "served, queries/s", f["served /s"])
    share = f["served /s"] / f["in process /s"]
    row(
        table,
        "served / in process",
        share,
        ">= 0.85 at 20M" if "20M" in name else "",
        share >= 0.85 if "20M" in name else None,
    )
    gain = f["served /s"] / f["served without batching /s"]
    row(table, "batching on / off", gain, ">= 2.5", gain >= 2.5)
    row(
        table,
        "in process, best batch / one by one",
        f["in process /s"] / f["in process one by one /s"],
    )
    row(table, "served under load, p50 ms", f["served p50 ms"])
    row(table, "served under load, p99 ms", f["served p99 ms"])
    if "bls p50 ms" in f:
        row(table, "retriever as models of the server (bls), p50 ms", f["bls p50 ms"])
        row(table, "price of bls per level, ms", (f["bls p50 ms"] - f["grpc p50 ms"]) / len(SIZES))
    if "peer /s" in f:
        row(table, "the same model with generate(), queries/s", f["peer /s"])
        row(table, "the same model with generate(), p50 ms under load", f["peer p50 ms"])
        row(table, "ours / generate()", f["served /s"] / f["peer /s"])
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, action="append", default=[], help="measure these bundles as well")
    parser.add_argument("--sizes", nargs="*", default=["tiny", "20M"], choices=["tiny", "20M"])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--memory", action="store_true", help="two instances over an index of 1e7 items")
    parser.add_argument("--memory-items", type=int, default=10_000_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    everything: dict[str, dict[str, float]] = {}
    for name, path in [(str(b), b) for b in args.bundle] + [(size, None) for size in args.sizes]:
        console.print(f"measuring {name} ...")
        figures = measure(Path(name).name, path or make_bundle(name), args.seconds)
        if path is None:
            figures |= measure_bls(name, make_bundle(name), args.seconds)
        if path is None and not args.no_peer:
            figures |= measure_peer(name, args.seconds)
        everything[name] = figures
        show(name, figures)
    if args.memory:
        f = everything["memory"] = measure_memory(args.memory_items)
        process = f["2 instance(s), small index"] - f["1 instance(s), small index"]
        more = f["2 instance(s)"] - f["1 instance(s)"] - process
        table = Table("figure", "MB", "goal", "met", title=f"memory, {args.memory_items:,} items")
        for what in f:
            row(table, what, f[what])
        row(table, "a second process, whatever the index", process)
        row(table, "a second instance beyond that", more, "<= 0.3 of the index", more <= 0.3 * f["index and items"])
        Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
