"""The constrained search beside unconstrained ones, other constraints and the published decoder: one table.

    .venv/bin/python tests/benchmarks/bench_step.py [--max-items 1e8] [--reference CHECKOUT] [--plot FILE] [--json FILE]

No model runs: every search is handed the same random logits, level by level, so a row is what the search itself costs.
Two threads. The rows take turns, and a time is the fastest of all its runs (the machine may be busy with other things);
the column of levels has the fastest of each level. Catalogues are uniform, seed 0, and kept in .bench/ for later runs.
On a GPU rows of `step_gpu.py` are added. `--reference` is a checkout of youtube/static-constraint-decoding.
"""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("NUMBA_NUM_THREADS", "2")

import numpy as np
import torch
from trieton.index.static_index import StaticIndex
from trieton.search.beam import beam_search

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "benchmarks")]

from searching import plane_of  # noqa: E402
from step_peers import (  # noqa: E402
    Argpartition,
    DictTrie,
    HashBitmap,
    HuggingFace,
    MarisaTrie,
    OneStage,
    OneStageFused,
    PrefixSearch,
    Published,
    TwoStage,
    finish,
    sorted_codes,
)
from step_rows import Row, Shape, bytes_of_index, catalogue, clock, run_ours, run_peer  # noqa: E402

SIZES = (10**5, 10**6, 10**7, 10**8)
MAIN, WIDE = Shape(2, 70, 2048, 8), Shape(2, 256, 8192, 3)
CPU = torch.device("cpu")


# ---- the rows


def ours(name: str, index: StaticIndex, shape: Shape, logits: list[Any], planes: Any = None) -> Row:
    touched = sum((rows[0] if isinstance(rows, tuple) else rows).nbytes for rows in logits)
    touched += bytes_of_index(index, shape, logits)
    run = run_ours(index, shape, logits, planes)
    return Row(f"ours, {shape}", name, True, run, touched / shape.levels / 1e6)


def check(index: StaticIndex, shape: Shape, logits: list[torch.Tensor], peer: Any) -> None:
    """An exact peer must find what we find, or the row compares nothing."""
    result = beam_search(lambda level, *_: logits[level], index, batch_size=shape.batch, beam_width=shape.beam)
    codes, scores = finish(peer.levels(logits))
    if scores is not None:
        np.testing.assert_allclose(scores, result.scores, atol=1e-4, err_msg=peer.name)
    assert {*map(tuple, codes[0].tolist())} == {*map(tuple, result.codes[0].tolist())}, peer.name


def unconstrained(shape: Shape, logits: list[torch.Tensor]) -> list[Row]:
    from step_compiled import Compiled

    rows = []
    for peer in [kind(shape.beam) for kind in (OneStage, OneStageFused, TwoStage, Argpartition)]:
        touched = 4 * sum(t.nbytes for t in logits)  # read twice, written once, and read to be ranked
        rows.append(Row(f"unconstrained, {shape}", peer.name, True, run_peer(peer, logits), touched))
    compiled = Compiled(shape.batch, shape.beam)
    touched = sum(t.nbytes for t in logits)
    rows.append(Row(f"unconstrained, {shape}", compiled.name, True, run_peer(compiled, logits), touched))
    for row in rows:
        row.megabytes = (row.megabytes or 0) / shape.levels / 1e6
    return rows


def constrained(index: StaticIndex, shape: Shape, logits: list[torch.Tensor], reference: Path | None) -> list[Row]:
    codes = sorted_codes(index)
    peers: list[Any] = []
    if shape == MAIN:
        peers = [PrefixSearch(shape.beam, codes, CPU), HashBitmap(shape.beam, codes, CPU), DictTrie(shape.beam, codes)]
        if importlib.util.find_spec("transformers"):
            peers.append(HuggingFace(shape.beam, codes))
        if importlib.util.find_spec("marisa_trie"):
            peers.append(MarisaTrie(shape.beam, codes))
    if reference is not None:
        peers.append(Published(shape.beam, codes, shape.codes, CPU, reference))
    for peer in peers:
        if peer.exact:
            check(index, shape, logits, peer)
    section = f"constrained, {shape}, N={index.num_leaves:.0e}"
    return [Row(section, peer.name, peer.exact, run_peer(peer, logits)) for peer in peers]


def measure(max_items: int, reference: Path | None) -> list[Row]:
    logits, wide_logits = MAIN.logits(), WIDE.logits()
    sizes = [n for n in SIZES if n <= max_items] or [max_items]
    peer_items = min(10**7, sizes[-1])
    index, wide = catalogue(peer_items, MAIN), catalogue(peer_items, WIDE)
    rows = unconstrained(MAIN, logits)
    rows += [ours(f"N={items:.0e}", catalogue(items, MAIN), MAIN, logits) for items in sizes]
    with_log_z = [(level, level.logsumexp(2)) for level in logits]
    rows.append(ours(f"N={peer_items:.0e}, log_z from the model", index, MAIN, with_log_z))
    half = np.random.default_rng(3).random((2, index.num_leaves)) < 0.5
    few = np.arange(index.num_leaves) % (index.num_leaves // 500) != 7
    forms = {
        "a plane each, all bits set": [plane_of(index, np.ones(index.num_leaves, bool), "bits") for _ in range(2)],
        "a plane each, half of the items": [plane_of(index, mask, "bits") for mask in half],
        "500 excluded items each": [plane_of(index, few, "dead") for _ in range(2)],
    }
    rows += [ours(f"N={peer_items:.0e}, {name}", index, MAIN, logits, planes) for name, planes in forms.items()]
    rows += constrained(index, MAIN, logits, reference)
    rows += unconstrained(WIDE, wide_logits)
    rows.append(ours(f"N={peer_items:.0e}", wide, WIDE, wide_logits))
    rows += constrained(wide, WIDE, wide_logits, reference)
    clock(rows)
    return rows


# ---- what it comes to


def goals(rows: list[Row]) -> list[tuple[str, str, str]]:
    """(figure, goal, measured), from the rows."""

    def total(section: str, name: str = "") -> float:
        found = [r.total for r in rows if r.section.startswith(section) and r.name.startswith(name)]
        return min(found, default=float("nan"))

    out = []
    for shape in (MAIN, WIDE):
        mine = [r for r in rows if r.section == f"ours, {shape}" and "," not in r.name]
        slowest = max(r.total for r in mine)
        library = min(r.total for r in rows if r.section == f"unconstrained, {shape}" and "compiled" not in r.name)
        out.append((f"ours / best unconstrained of torch and NumPy, {shape}", "<= 0.5", f"{slowest / library:.2f}"))
        compiled = total(f"unconstrained, {shape}", "our compiled")
        out.append((f"ours / our compiled step without a trie, {shape}", "<= 0.5", f"{slowest / compiled:.2f}"))
        published = total(f"constrained, {shape}", "published")
        if np.isfinite(published):
            same = next(r for r in reversed(mine) if float(r.name[2:]) <= 1e7)
            out.append((f"ours / published decoder, {shape}", "<= 0.167", f"{same.total / published:.3f}"))
            handed = total(f"ours, {shape}", f"{same.name}, log_z from the model")
            if np.isfinite(handed):
                out.append((f"the same with log_z from the model, {shape}", "<= 0.167", f"{handed / published:.3f}"))
    sizes = [r for r in rows if r.section == f"ours, {MAIN}" and "," not in r.name]
    at_peers = next(r for r in reversed(sizes) if float(r.name[2:]) <= 1e7)
    exact = [
        r
        for r in rows
        if r.section.startswith(f"constrained, {MAIN}") and r.exact and not r.name.startswith("published")
    ]
    best = min(exact, key=lambda r: r.total)
    out.append((f"best other exact constraint ({best.name}) / ours", ">= 10", f"{best.total / at_peers.total:.0f}"))
    out.append(
        (f"step at {sizes[-1].name} / step at {sizes[0].name}", "<= 1.5", f"{sizes[-1].total / sizes[0].total:.2f}")
    )
    for name in ("a plane each, all bits set", "a plane each, half of the items", "500 excluded"):
        planed = next(r for r in rows if r.section == f"ours, {MAIN}" and name in r.name)
        out.append((f"extra time: {name}", "<= 10 %", f"{(planed.total / at_peers.total - 1) * 100:.0f} %"))
    return out


def print_table(rows: list[Row], figures: list[tuple[str, str, str]]) -> None:
    from step_table import show

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU here, so no GPU rows"
    show(rows, figures, f"Search without a model, {torch.get_num_threads()} threads; {gpu}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-items", type=lambda text: int(float(text)), default=SIZES[-1])
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--gpu-only", action="store_true", help="only the rows of a GPU")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(2)
    rows: list[Row] = [] if args.gpu_only else measure(args.max_items, args.reference)
    figures = [] if args.gpu_only else goals(rows)
    if torch.cuda.is_available():
        from step_gpu import gpu_figures, gpu_rows

        found = gpu_rows(min(10**7, args.max_items), MAIN, args.reference)
        clock(found, rounds=3)
        rows, figures = rows + found, figures + gpu_figures(found, MAIN)
    elif args.gpu_only:
        sys.exit("--gpu-only: torch sees no CUDA GPU here")
    print_table(rows, figures)
    if args.json:
        args.json.write_text(json.dumps({"rows": [r.figures() for r in rows], "figures": figures}, indent=1))
    if args.plot:
        from step_table import plot

        plot(rows, args.plot)


if __name__ == "__main__":
    main()
