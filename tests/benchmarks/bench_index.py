"""The index in figures: bytes, time and memory of the build, time to the first answer, growth with N.

    .venv/bin/python tests/benchmarks/bench_index.py [--max-items 100_000_000] [--reference PATH] [--json FILE]

Catalogues are uniform, N items x 8 levels x 2048 codes, seed 0. Every figure is a whole process of its own: `seconds`
is measured inside it from the rows in memory (or on disk) to the finished index, `process` from its start to its end,
`peak` is the most memory it ever held. Medians of `--repeats` processes. `--reference` is a checkout of
youtube/static-constraint-decoding, whose published builder then runs on the same rows, sorted first as its own
benchmark sorts them.
"""

import argparse
import csv
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
OFFICE = ROOT.parent / "shared" / "data" / "office" / "items.csv"
LEVELS, CODES = 8, 2048
ITEMS = 10_000_000
PART = 5_000_000
MEMORY = 4_000_000_000


def uniform(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CODES, (count, LEVELS), dtype=np.uint16)


# ---- what runs in a process of its own


def build_in_memory(count: str, out: str) -> dict[str, Any]:
    from trieton_builder.indexing.trie import build_index

    codes = uniform(int(count))
    started = time.perf_counter()
    index = build_index(codes, codebook_sizes=[CODES] * LEVELS)
    seconds = time.perf_counter() - started
    report = {"seconds": seconds, "bytes": index.nbytes, "peak": peak()}
    if out:
        index.save(out)
    return report


def build_reference(count: str, checkout: str) -> dict[str, Any]:
    sys.path.insert(0, checkout)
    from static_decoding.csr_utils import build_static_index

    codes = uniform(int(count)).astype(np.int32)  # the type it works in
    started = time.perf_counter()
    ordered = codes[np.lexsort(codes.T[::-1])]
    tensors = build_static_index(ordered, CODES, 2)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "bytes": sum(a.nbytes for a in tensors if hasattr(a, "nbytes")), "peak": peak()}


def build_from_disk(folder: str, out: str) -> dict[str, Any]:
    started = time.perf_counter()
    from trieton.index.static_index import StaticIndex
    from trieton_builder.catalogue.keys import KeyLayout
    from trieton_builder.catalogue.read import CatalogSource
    from trieton_builder.indexing.build_file import build_file

    source = CatalogSource(folder, KeyLayout.of([CODES] * LEVELS))
    build_file(source, out, engine="duckdb", memory=MEMORY)
    seconds = time.perf_counter() - started
    report = {"seconds": seconds, "peak": peak(), "file": Path(out).stat().st_size}
    return report | {"bytes": StaticIndex.load(out, verify=False).nbytes}


def first_answer(path: str) -> dict[str, Any]:
    from trieton.index.static_index import StaticIndex
    from trieton.search.beam import beam_search
    from trieton_builder.indexing.trie import build_index

    rng = np.random.default_rng(0)
    logits = [rng.standard_normal((1, 1 if level == 0 else 10, CODES)).astype(np.float32) for level in range(LEVELS)]

    def answer(index: StaticIndex) -> np.ndarray:
        result = beam_search(lambda level, codes, parents: logits[level], index, batch_size=1, beam_width=10)
        return index.catalog.ids(result.leaves[0])

    answer(build_index(uniform(1000), codebook_sizes=[CODES] * LEVELS))  # the code is loaded, the index is not
    times = []
    for verify in (True, False):
        started = time.perf_counter()
        found = answer(StaticIndex.load(path, verify=verify))
        times.append(time.perf_counter() - started)
        assert len(found) == 10
    return {"seconds": times[0], "unverified": times[1], "peak": peak()}


def write_rows(count: str, folder: str) -> dict[str, Any]:
    """Parquet parts with a column per level and item ids in no order."""
    import polars as pl

    rng = np.random.default_rng(0)
    Path(folder).mkdir()
    for number, start in enumerate(range(0, int(count), PART)):
        rows = np.arange(start, min(start + PART, int(count)))
        codes = rng.integers(0, CODES, (len(rows), LEVELS), dtype=np.uint16)
        columns = {"item_id": rows * 7919 % (10**12 + 39)}  # a prime: all ids differ
        columns |= {f"code_{level}": np.ascontiguousarray(codes[:, level]) for level in range(LEVELS)}
        pl.DataFrame(columns).write_parquet(Path(folder) / f"part-{number:04}.parquet")
    return {}


def peak() -> int:
    """Bytes that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


PARTS = {f.__name__: f for f in (build_in_memory, build_reference, build_from_disk, first_answer, write_rows)}


# ---- what runs them and prints


def measure(name: str, *arguments: object, repeats: int = 1) -> dict[str, float]:
    """Median of each figure over several processes."""
    reports = []
    for _ in range(repeats):
        started = time.perf_counter()
        command = [sys.executable, __file__, "--part", name, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        reports.append(json.loads(done.stdout.splitlines()[-1]) | {"process": time.perf_counter() - started})
    return {key: float(np.median([report[key] for report in reports])) for key in reports[0]}


def row(name: str, ours: str, theirs: str = "", goal: str = "") -> None:
    print(f"{name:<46} {theirs:>20} {ours:>28} {goal:>16}", flush=True)


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def compare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    count = min(ITEMS, args.max_items)
    name = f"N = {count:,}"
    row("", "ours", "published", "goal")
    ours = measure("build_in_memory", count, folder / "index.safetensors", repeats=args.repeats)
    theirs = measure("build_reference", count, args.reference) if args.reference else None

    def beside(key: str, form: Any) -> str:
        return form(theirs[key]) if theirs else ""

    row(
        f"bytes per item without item ids, {name}",
        f"{ours['bytes'] / count:.2f}",
        beside("bytes", lambda b: f"{b / count:.1f}"),
        "<= 15",
    )
    row(f"sort + build, {name}", f"{ours['seconds']:.2f} s", beside("seconds", lambda s: f"{s:.1f} s"), "<= 4 s")
    row("  its whole process", f"{ours['process']:.2f} s", beside("process", lambda s: f"{s:.1f} s"))
    row(f"peak memory, {name}", gigabytes(ours["peak"]), beside("peak", gigabytes), "<= 1.0 GB")
    answer = measure("first_answer", folder / "index.safetensors", repeats=args.repeats)
    row(f"load to first answer, {name}", f"{answer['seconds']:.3f} s", "", "<= 0.2 s")
    row("  where the bundle was verified before", f"{answer['unverified']:.3f} s")
    return {"in_memory": ours, "published": theirs, "first_answer": answer}


def growth(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    sizes = [n for n in (100_000, 1_000_000, 10_000_000, 100_000_000) if n <= args.max_items]
    print(
        f"\nfrom Parquet with item ids, out of core, --memory 4GB\n{'items':>12} {'seconds':>9} {'us/item':>8}", end=""
    )
    print(f" {'peak':>9} {'trie':>9} {'B/item':>7} {'file':>9}")
    reports: list[dict[str, Any]] = []
    for count in sizes:
        rows, out = folder / f"rows-{count}", folder / "built.safetensors"
        measure("write_rows", count, rows)
        report: dict[str, Any] = measure("build_from_disk", rows, out) | {"items": count}
        reports.append(report)
        print(
            f"{count:>12,} {report['seconds']:>9.2f} {1e6 * report['seconds'] / count:>8.2f} "
            f"{gigabytes(report['peak']):>9} {gigabytes(report['bytes']):>9} {report['bytes'] / count:>7.2f} "
            f"{gigabytes(report['file']):>9}",
            flush=True,
        )
        shutil.rmtree(rows)
        out.unlink()
    if len(reports) > 2:
        x = np.log([r["items"] for r in reports[1:]])
        slope = np.polyfit(x, np.log([r["seconds"] for r in reports[1:]]), 1)[0]
        print(f"fitted from {sizes[1]:,} on: seconds ~ N ^ {slope:.2f}")
    if sizes[-1] == 100_000_000:
        print("goals at 100,000,000: <= 360 s, peak <= 5 GB, trie <= 1.5 GB")
    return reports


def real_ids() -> dict[str, Any] | None:
    from trieton_builder.indexing.trie import build_index
    from trieton_builder.report.inspection import inspect_index

    if not OFFICE.exists():
        print("\nreal semantic IDs: skipped, ../shared/data/office is not there")
        return None
    rows = list(csv.DictReader(OFFICE.open()))
    codes = np.array([[int(r[f"code_{level}"]) for level in range(3)] for r in rows])
    index = build_index(codes, codebook_sizes=[256] * 3, item_ids=np.array([int(r["item_id"]) for r in rows]))
    stats = inspect_index(index)
    print(
        f"\nreal semantic IDs (office): {stats.items:,} items on {stats.leaves:,} IDs, "
        f"{stats.bytes_per_item:.2f} bytes per item (floor {stats.floor_bytes_per_item:.2f})"
    )
    return {"items": stats.items, "bytes_per_item": stats.bytes_per_item, "floor": stats.floor_bytes_per_item}


def main() -> None:
    if sys.argv[1:2] == ["--part"]:
        print(json.dumps(PARTS[sys.argv[2]](*sys.argv[3:])))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-items", type=int, default=100_000_000, help="the largest catalogue")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--reference", type=Path, help="a checkout of youtube/static-constraint-decoding")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench", help="where catalogues are written meanwhile")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args()
    if args.reference and not (args.reference / "static_decoding" / "csr_utils.py").is_file():
        parser.error(f"{args.reference}: expected a checkout with static_decoding/csr_utils.py")
    args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.work, prefix="index-") as name:
        figures = {**compare(Path(name), args), "growth": growth(Path(name), args), "office": real_ids()}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
