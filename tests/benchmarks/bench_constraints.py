"""Constraints at scale: compile, memory, search, lists, refresh, and what filtering after the search leaves.

    .venv/bin/python tests/benchmarks/bench_constraints.py [--items 10_000_000] [--json FILE]

The catalogue is uniform, seed 0, and kept in .bench/ for the next run. Times are of one process: medians, and the
quickest of many for the ratio of two searches.
"""

import argparse
import csv
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from trieton.bundle import Bundle
from trieton.constraint.compile import compile_constraint, plane_cache, precompile
from trieton.constraint.expressions import parse
from trieton.constraint.plane import Plane
from trieton.index.static_index import StaticIndex
from trieton.index.tensorfile import DamagedFileError
from trieton.search.beam import beam_search
from trieton.search.searcher import Query, QueryError, Searcher
from trieton_builder.indexing.trie import build_index

ROOT = Path(__file__).parents[2]
SHARES = {"rare": 0.01, "third": 0.3, "half": 0.5, "thousandth": 0.001}
THREE_SETS = ("rare and (third or not half)", "half and third and not rare", "rare or third or half")
OFFICE = ROOT.parent / "shared" / "data" / "office"


class TableModel:
    """Logits that depend on request, level and the code before; cheap enough not to hide the search behind them."""

    def __init__(self, levels: int, codes: int, seed: int):
        rng = np.random.default_rng(seed)
        self.after = [rng.standard_normal((codes, codes)).astype(np.float32) * 2 for _ in range(levels)]

    def stepper(self, seeds: np.ndarray) -> Callable:
        rows = [np.random.default_rng(seed) for seed in seeds]
        first = np.array([rng.standard_normal((1, self.after[0].shape[1])) for rng in rows], np.float32) * 2

        def next_logits(level, codes, parents):
            if level == 0:
                return first
            return self.after[level][np.maximum(np.asarray(codes), 0)] + first

        return next_logits


def median_ms(function: Callable[[], object], repeats: int = 9) -> float:
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return 1e3 * float(np.median(times))


def catalogue(folder: Path, items: int, levels: int, codes: int) -> StaticIndex:
    """The uniform catalogue, built once. Item ids are spread over 62 bits and in no order of the semantic IDs."""
    path = folder / f"constraints-{items}x{levels}x{codes}.safetensors"
    try:
        return StaticIndex.load(path)
    except (OSError, DamagedFileError):
        pass
    rng = np.random.default_rng(0)
    rows = rng.integers(0, codes, (items, levels), dtype=np.uint16)
    ids = (np.arange(items, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(2)).astype(np.int64)
    sets = {name: rng.random(items) < share for name, share in SHARES.items()}
    folder.mkdir(parents=True, exist_ok=True)
    build_index(rows, codebook_sizes=(codes,) * levels, item_ids=ids, sets=sets).save(path)
    return StaticIndex.load(path)


class Report:
    """Prints rows as they are measured and keeps them for `--json`."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def add(self, what: str, value: float, unit: str, goal: float | None = None, note: str = "") -> None:
        good = None if goal is None else value <= goal
        verdict = "" if goal is None else f"goal <= {goal:g}  {'reached' if good else 'MISSED'}"
        print(f"{what:<74} {value:>10.4g} {unit:<8} {verdict:<24} {note}", flush=True)
        self.rows.append({"what": what, "value": value, "unit": unit, "goal": goal, "reached": good, "note": note})


def bench_compile(index: StaticIndex, report: Report) -> None:
    plane_cache(index).resize(0)  # nothing is kept, so every call compiles
    edges = sum(len(c) for c in index.codes) + (index.num_leaves if index.head_levels < index.num_levels else 0)
    for text in THREE_SETS:
        plane = compile_constraint(index, text)
        share = plane.allows(np.arange(index.num_items)).mean()
        took = median_ms(lambda text=text: compile_constraint(index, text))
        report.add(f"compile `{text}`", took, "ms", 150, f"{share:.2%} of the items allowed")
        bits = 8 * (plane.nbytes - len(plane.bits)) / edges  # less what rounding up to whole bytes may add
        report.add("  memory of its plane, item bits included", bits, "bit/edge", 1)
    plane_cache(index).resize(1 << 29)
    compile_constraint(index, THREE_SETS[0])
    report.add("  the same from the cache", median_ms(lambda: compile_constraint(index, THREE_SETS[0]), 99), "ms")


def bench_search(index: StaticIndex, model: TableModel, report: Report) -> None:
    width = index.codebook_sizes[0]
    for batch_size, beam_width in ((1, 50), (8, 50)):
        logits = [
            np.random.default_rng(seed).standard_normal((batch_size, beam_width if seed else 1, width), np.float32) * 3
            for seed in range(index.num_levels)
        ]

        def search(plane: Plane | None, logits=logits, batch_size=batch_size, beam_width=beam_width) -> float:
            started = time.perf_counter()
            beam_search(
                lambda level, codes, parents: logits[level],
                index,
                batch_size=batch_size,
                beam_width=beam_width,
                constraints=[plane] * batch_size,
            )
            return time.perf_counter() - started

        rng = np.random.default_rng(1)
        some = index.catalog.item_ids[rng.choice(index.num_items, 10_000, replace=False)]
        planes = {
            "50 % allowed": compile_constraint(index, "half"),
            "15 % allowed, three sets": compile_constraint(index, THREE_SETS[1]),
            "0.65 % allowed, three sets": compile_constraint(index, THREE_SETS[0]),
            "500 excluded": compile_constraint(index, exclude=some[:500]),
            "15 % allowed and 500 excluded": compile_constraint(index, THREE_SETS[1], exclude=some[:500]),
            "10,000 included": compile_constraint(index, include=some),
        }
        for plane in (None, *planes.values()):
            search(plane)
        for name, plane in planes.items():
            # Turn about, and the quickest of each: what else the machine does can only add.
            times = [(search(plane), search(None)) for _ in range(81)]
            best, without = (1e3 * min(column) for column in zip(*times, strict=True))
            what = f"search with a plane / without, {name}, batch {batch_size}, beam {beam_width}"
            report.add(what, best / without, "", 1.1, f"{best:.3f} / {without:.3f} ms, all levels, no model")


def bench_lists(index: StaticIndex, report: Report) -> None:
    rng = np.random.default_rng(2)
    base = THREE_SETS[1]
    precompile(index, [base])
    for what, count, goal in (
        ("exclude", 500, 1),
        ("exclude", 10_000, None),
        ("include", 500, None),
        ("include", 10_000, 10),
    ):
        lists = [index.catalog.item_ids[rng.choice(index.num_items, count, replace=False)] for _ in range(20)]
        for text in (None, base):
            place = iter(lists * 5)
            took = median_ms(
                lambda what=what, text=text, p=place: compile_constraint(index, text, **{what: next(p)}), 39
            )
            report.add(f"{count:,} ids to {what}{' and a plane' if text else ''}, per request", took, "ms", goal)


def bench_overfetch(index: StaticIndex, model: TableModel, report: Report, requests: int = 192) -> None:
    """Share of requests left with fewer than 10 results when the filter comes after the search."""
    for expression, share in (("rare", "1 %"), ("thousandth", "0.1 %")):
        plane = compile_constraint(index, expression)
        for beam_width, constraint in ((10, plane), (100, None), (1000, None)):
            short, found, took = 0, 0, 0.0
            batch = 64 if beam_width == 10 else 8 if beam_width == 100 else 2
            batches = requests // batch if beam_width < 1000 else 24 // batch
            for number in range(batches):
                seeds = np.arange(number * batch, (number + 1) * batch)
                started = time.perf_counter()
                result = beam_search(
                    model.stepper(seeds),
                    index,
                    batch_size=batch,
                    beam_width=beam_width,
                    constraints=[constraint] * batch,
                )
                took += time.perf_counter() - started
                for leaves in result.leaves:
                    positions = np.concatenate([np.arange(*index.catalog.span(leaf)) for leaf in leaves[leaves >= 0]])
                    count = min(10, int(plane.allows(positions).sum()))
                    found += count
                    short += count < 10
            asked = batches * batch
            how = "exact plane, beam 10" if constraint is not None else f"fetch {beam_width}, filter after the search"
            report.add(
                f"{share} allowed, {how}: requests with < 10 results",
                100 * short / asked,
                "%",
                0 if constraint is not None else None,
                f"{found / asked:.2f} results on average, {1e3 * took / asked:.1f} ms per request",
            )


def bench_refresh(index: StaticIndex, folder: Path, report: Report) -> None:
    import polars as pl
    import torch
    from transformers import T5Config, T5ForConditionalGeneration
    from trieton.retriever.session import PromptTemplate, TokenMap
    from trieton_builder.bundle.refresh import refresh
    from trieton_builder.bundle.write import write_bundle
    from trieton_builder.export import export_retriever

    folder = folder / "refresh"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    tokens = TokenMap.contiguous(index.codebook_sizes, first=3)
    config = T5Config(vocab_size=3 + sum(index.codebook_sizes), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 1
    prompt = PromptTemplate(tokens, max_items=4)
    export_retriever(T5ForConditionalGeneration(config).eval(), folder / "retriever", prompt, max_length=64)
    write_bundle(folder / "old", index=index, retriever_dir=folder / "retriever", expressions=THREE_SETS)
    rng = np.random.default_rng(4)
    order = rng.permutation(index.num_items)
    columns = {name: rng.random(index.num_items) < share for name, share in SHARES.items()}
    pl.DataFrame({"item_id": index.catalog.item_ids[order], **columns}).write_parquet(folder / "sets.parquet")
    started = time.perf_counter()
    made = refresh(folder / "old", folder / "sets.parquet", folder / "new")
    took = time.perf_counter() - started
    note = f"{made.linked_bytes / 1e6:.0f} MB linked, {made.copied_bytes / 1e6:.0f} MB copied"
    report.add(f"refresh {len(made.sets)} named sets of {index.num_items:,} items", took, "s", 10, note)
    started = time.perf_counter()
    bundle = Bundle.open(folder / "new")
    opened = time.perf_counter() - started
    searcher = Searcher(bundle)
    took = time.perf_counter() - started
    what = "  load it: verify, map, start the engine, compile 3 expressions"
    report.add(what, took, "s", 1, f"{opened:.2f} s of it to verify and map")
    bench_answers(searcher, report)
    shutil.rmtree(folder)


def bench_answers(searcher: Searcher, report: Report) -> None:
    """From history to items, with a model whose cost is the least there can be."""
    history = searcher.index.catalog.item_ids[:4]

    def search(batch_size: int, text: str | None) -> float:
        started = time.perf_counter()
        for answer in searcher.search([Query(history, beam_width=50, constraint=text)] * batch_size):
            if isinstance(answer, QueryError):
                raise answer
        return time.perf_counter() - started

    for batch_size in (1, 8):
        for text in THREE_SETS:
            search(batch_size, text)
            times = [(search(batch_size, text), search(batch_size, None)) for _ in range(25)]
            best, without = (1e3 * min(column) for column in zip(*times, strict=True))
            what = f"answer with a plane / without, batch {batch_size}, `{text}`"
            report.add(what, best / without, "", 1.1, f"{best:.2f} / {without:.2f} ms, history to items, a tiny model")


def bench_office(report: Report, requests: int = 120) -> None:
    """Random expressions and lists over a public catalogue of real semantic IDs, against filtering it first."""
    if not OFFICE.exists():
        print(f"{OFFICE}: not here, skipped")
        return
    sys.path.insert(0, str(ROOT / "tests"))
    import oracle

    with open(OFFICE / "items.csv") as file:
        table = list(csv.DictReader(file))
    codes = np.array([[int(row[f"code_{level}"]) for level in range(3)] for row in table])
    ids = np.array([int(row["item_id"]) for row in table])
    rng = np.random.default_rng(5)
    sets = {name: rng.random(len(ids)) < share for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.01))}
    sizes = tuple(int(c) + 1 for c in codes.max(0))
    index = build_index(codes, codebook_sizes=sizes, item_ids=ids, sets=sets)
    equal = 0
    for request in range(requests):
        text = ["a and b", "c", "not a or c", "(a or b) and not c", None][request % 5]
        keep = np.ones(len(ids), bool)
        if text is not None:
            bits = {name: np.packbits(mask, bitorder="little") for name, mask in sets.items()}
            keep = np.unpackbits(parse(text).evaluate(bits, len(ids)), bitorder="little", count=len(ids)).astype(bool)
        lists = {}
        if request % 3 == 1:
            lists["exclude"] = rng.choice(ids, 500, replace=False)
            keep &= ~np.isin(ids, lists["exclude"])
        if request % 3 == 2:
            lists["include"] = rng.choice(ids, 300, replace=False)
            keep &= np.isin(ids, lists["include"])
        toy = oracle.ToyModel(sizes, request)
        known: dict[oracle.Codes, np.ndarray] = {}
        prefixes: list[oracle.Codes] = [()]

        def logits_of(prefix: oracle.Codes, toy=toy, known=known) -> np.ndarray:
            if prefix not in known:
                known[prefix] = toy(prefix)
            return known[prefix]

        def next_logits(level, chosen, parents, logits_of=logits_of):
            nonlocal prefixes
            if level:
                prefixes = [
                    (*prefixes[p], int(c)) if p >= 0 else (0,) * level
                    for c, p in zip(chosen[0], parents[0], strict=True)
                ]
            return np.array([[logits_of(prefix) for prefix in prefixes]])

        plane = compile_constraint(index, text, **lists)
        result = beam_search(next_logits, index, batch_size=1, beam_width=20, constraints=[plane])
        want, _ = oracle.beam_search(logits_of, {tuple(row) for row in codes[keep].tolist()}, 20)
        count = int(result.num_valid[0])
        got = zip(result.codes[0, :count].tolist(), result.scores[0, :count], strict=True)
        equal += [(tuple(c), s) for c, s in got] == want
    report.add(
        "office: results unlike filter-then-search, bit for bit",
        100 - 100 * equal / requests,
        "%",
        0,
        f"{requests} requests",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10_000_000)
    parser.add_argument("--levels", type=int, default=8)
    parser.add_argument("--codes", type=int, default=2048)
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--only", nargs="*", choices=["compile", "search", "lists", "overfetch", "refresh", "office"])
    args = parser.parse_args()
    report = Report()
    started = time.perf_counter()
    index = catalogue(args.folder, args.items, args.levels, args.codes)
    precompile(index)
    ready = time.perf_counter() - started
    print(f"{args.items:,} items x {args.levels} levels x {args.codes} codes, ready in {ready:.1f} s")
    model = TableModel(args.levels, args.codes, 0)
    parts: dict[str, Callable[[], None]] = {
        "compile": lambda: bench_compile(index, report),
        "search": lambda: bench_search(index, model, report),
        "lists": lambda: bench_lists(index, report),
        "overfetch": lambda: bench_overfetch(index, model, report),
        "refresh": lambda: bench_refresh(index, args.folder, report),
        "office": lambda: bench_office(report),
    }
    for name, part in parts.items():
        if not args.only or name in args.only:
            part()
    if args.json:
        args.json.write_text(json.dumps(report.rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
