"""What `bench_step.py` and `step_gpu.py` share: what is searched, a line of the table, and the clock."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trieton.constraint.plane import Plane
from trieton.index.static_index import StaticIndex
from trieton.search.beam import beam_search

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Shape:
    """What is searched: `batch` requests, `beam` beams, `codes` codes on each of `levels` levels."""

    batch: int
    beam: int
    codes: int
    levels: int

    def logits(self) -> list[torch.Tensor]:
        rng = torch.Generator().manual_seed(1)
        beams = [1] + [self.beam] * (self.levels - 1)
        return [torch.randn((self.batch, m, self.codes), generator=rng) * 2 for m in beams]

    def __str__(self) -> str:
        return f"B={self.batch} M={self.beam} V={self.codes} L={self.levels}"


@dataclass
class Row:
    """A line of the table. `run` searches once and returns the clock at its start, after each level, and at its end."""

    section: str
    name: str
    exact: bool
    run: Callable[[], list[float]]
    megabytes: float | None = None  # touched per step
    total: float = float("inf")  # seconds
    levels: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("section", "name", "exact", "total", "levels", "megabytes")}


def catalogue(items: int, shape: Shape, device: str = "cpu") -> StaticIndex:
    """The uniform catalogue, built once, in a process of its own so that its memory is free again."""
    folder = ROOT / ".bench"
    path = folder / f"step-{items}x{shape.levels}x{shape.codes}.safetensors"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        code = (
            "import sys, numpy as np; from trieton_builder.indexing.trie import build_index; "
            "n, l, v = map(int, sys.argv[1:4]); "
            "rows = np.random.default_rng(0).integers(0, v, (n, l), dtype=np.uint16); "
            "build_index(rows, codebook_sizes=(v,) * l).save(sys.argv[4])"
        )
        subprocess.run(
            [sys.executable, "-c", code, *map(str, (items, shape.levels, shape.codes)), str(path)], check=True
        )
    return StaticIndex.load(path, device, verify=False)


def clock(rows: list[Row], rounds: int = 8, seconds: float = 0.25) -> None:
    """Fill in the times: the rows take turns, so that whatever else the machine does meets all of them alike."""
    for number in range(rounds):
        for row in rows:
            row.run()
            begun, runs = time.perf_counter(), 0
            while runs < 2 or time.perf_counter() - begun < seconds:
                times = row.run()
                row.total = min(row.total, times[-1] - times[0])
                gaps = np.diff(times).tolist()
                row.levels = [min(pair) for pair in zip(row.levels, gaps, strict=True)] if row.levels else gaps
                runs += 1
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)


def run_ours(index: StaticIndex, shape: Shape, logits: list[Any], planes: list[Plane | None] | None) -> Callable:
    def run() -> list[float]:
        times = [time.perf_counter()]

        def next_logits(level: int, codes: Any, parents: Any) -> Any:
            if level:
                times.append(time.perf_counter())
            return logits[level]

        beam_search(next_logits, index, batch_size=shape.batch, beam_width=shape.beam, constraints=planes)
        return [*times, time.perf_counter()]

    return run


def run_peer(peer: Any, logits: list[torch.Tensor], wait: Callable[[], None] = lambda: None) -> Callable:
    def run() -> list[float]:
        times, levels = [time.perf_counter()], peer.levels(logits)
        for _ in levels:
            wait()
            times.append(time.perf_counter())
        if hasattr(peer, "asked"):  # the published decoder is one call: its levels begin when it asks for logits
            times = [*peer.asked, times[-1]]
        else:
            times[-1] = time.perf_counter()
        return times

    return run


def bytes_of_index(index: StaticIndex, shape: Shape, logits: list[Any]) -> int:
    """Bytes of codes and offsets that a search reads."""
    from trieton.search.kernels.cpu import Search

    search, total = Search(index, np.full(shape.batch, shape.beam, np.int32), [None] * shape.batch), 0
    for level, rows in enumerate(logits):
        children = int((search.hi - search.lo).sum())
        row = search.table[level]
        total += children * int(row[1]) + 2 * shape.batch * shape.beam * int(row[3])
        search.step(level, *(rows if isinstance(rows, tuple) else (rows, None)))
    return total
