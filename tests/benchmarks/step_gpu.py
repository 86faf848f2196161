"""The rows of `bench_step.py` on a GPU: our step by events and inside a CUDA graph, and the peers on the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_peers import HashBitmap, OneStage, OneStageFused, PrefixSearch, Published, TwoStage, sorted_codes
from step_rows import Row, Shape, bytes_of_index, catalogue, run_peer
from trieton.search.kernels.gpu import Search


def gpu_rows(items: int, shape: Shape, reference: Path | None) -> list[Row]:
    host, index = catalogue(items, shape), catalogue(items, shape, device="cuda")
    host_logits = shape.logits()
    logits = [rows.cuda() for rows in host_logits]
    touched = (sum(t.nbytes for t in logits) + bytes_of_index(host, shape, host_logits)) / shape.levels / 1e6
    search = Search(index, np.full(shape.batch, shape.beam, np.int32), [None] * shape.batch)
    section = f"on {torch.cuda.get_device_name()}, {shape}, N={items:.0e}"
    rows = [
        Row(section, "ours, launched step by step", True, _by_events(search, logits), touched),
        Row(section, "ours, in a CUDA graph", True, _in_graph(search, logits), touched),
    ]
    device, codes = torch.device("cuda"), sorted_codes(host)
    peers: list[Any] = [kind(shape.beam) for kind in (OneStage, OneStageFused, TwoStage)]
    peers += [PrefixSearch(shape.beam, codes, device), HashBitmap(shape.beam, codes, device)]
    if reference is not None:
        peers.append(Published(shape.beam, codes, shape.codes, device, reference))
    rows += [Row(section, p.name, p.exact, run_peer(p, logits, torch.cuda.synchronize)) for p in peers]
    return rows


def _steps(search: Search, logits: list[torch.Tensor]) -> Callable[[], None]:
    def steps() -> None:
        for level, rows in enumerate(logits):
            search.step(level, rows, None)

    return steps


def _by_events(search: Search, logits: list[torch.Tensor]) -> Callable[[], list[float]]:
    def run() -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(logits) + 1)]
        events[0].record()
        for level, rows in enumerate(logits):
            search.step(level, rows, None)
            events[level + 1].record()
        torch.cuda.synchronize()
        return [events[0].elapsed_time(event) / 1e3 for event in events]

    return run


def _in_graph(search: Search, logits: list[torch.Tensor]) -> Callable[[], list[float]]:
    """A graph is one launch, so it has one time: its levels are not told apart."""
    steps = _steps(search, logits)
    steps()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()

    def run() -> list[float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return [0.0, begin.elapsed_time(end) / 1e3]

    return run


def gpu_figures(rows: list[Row], shape: Shape) -> list[tuple[str, str, str]]:
    """(figure, goal, measured) of the rows above."""
    held = {row.name: row for row in rows if row.section.startswith("on ")}
    graph = held["ours, in a CUDA graph"]
    per_step = graph.total / shape.levels
    out = [
        ("time per step in a CUDA graph", "", f"{per_step * 1e6:.1f} us"),
        ("achieved bandwidth in a CUDA graph", "", f"{(graph.megabytes or 0) / 1e3 / per_step:.0f} GB/s"),
    ]
    best = min((row for name, row in held.items() if "top-k" in name), key=lambda row: row.total)
    out.append((f"ours in a CUDA graph / {best.name}", "<= 0.5", f"{graph.total / best.total:.2f}"))
    if Published.name in held:
        ratio = graph.total / held[Published.name].total
        out.append(("ours in a CUDA graph / published decoder", "<= 0.167", f"{ratio:.3f}"))
    return out
