"""A whole search as one CUDA graph: prefill, and of every level the decode and the step, in a single launch.

Launched one by one, the hundreds of small kernels of a search keep an accelerator waiting for the host. A graph has
fixed shapes and addresses, so a batch is padded to a bucket, and each bucket is captured once, when it is first asked
for. The search inside is that of `trieton.search.beam` on the "gpu" kernel, level for level; results are equal.

For the `torch.export` engine. On a CPU (with the interpreted kernel) the same code runs without being captured.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from trieton.constraint.plane import Plane
from trieton.index.static_index import StaticIndex
from trieton.retriever.session import Retriever
from trieton.retriever.torch_export import TorchEngine
from trieton.search.beam import BeamResult, checked_normalise, checked_planes, checked_widths, finish
from trieton.search.kernels import Beams
from trieton.search.kernels.gpu import Search

MAX_GRAPHS = 32  # the least recently used is dropped; their intermediate memory is shared
WARM_UPS = 2  # runs before capture: the first compiles kernels, the second finds everything allocated


class Bucket(NamedTuple):
    """Shapes of one graph: requests, prompt tokens and beams of each request."""

    batch: int
    length: int
    beams: int

    @classmethod
    def of(cls, batch: int, length: int, beams: int, *, max_length: int) -> "Bucket":
        """The smallest bucket that holds a batch: at most twice the requests, a quarter more beams and tokens.

        Short prompts and narrow beams are rounded to 16 tokens and 4 beams.
        """
        return cls(_power(batch), min(_rounded(length, 16), max_length), _rounded(beams, 4))


class CapturedSearch:
    """Searches of one retriever in one index. Not thread-safe: a graph has one set of inputs.

    Args:
        retriever: on the `torch.export` engine.
        index: loaded onto the engine's device.

    Raises:
        ValueError: another engine, or an index on another device.
    """

    def __init__(self, retriever: Retriever, index: StaticIndex):
        if not isinstance(retriever.engine, TorchEngine):
            raise ValueError(f"a captured search needs the engine 'torch', got {retriever.spec.engine!r}")
        if torch.device(index.device).type != retriever.engine.device.type:
            raise ValueError(
                f"expected index and retriever on one device, got {index.device}, {retriever.engine.device}"
            )
        self.retriever, self.index = retriever, index
        self._graphs: OrderedDict[Bucket, _Graph] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if retriever.engine.device.type == "cuda" else None

    def search(
        self,
        prompts: Sequence[np.ndarray],
        beam_width: int | Sequence[int] | np.ndarray,
        constraints: Sequence[Plane | None] | None = None,
        normalise: str | Sequence[str] = "vocabulary",
    ) -> BeamResult:
        """What `beam_search(retriever.start(prompts), index, ...)` returns for the same arguments.

        Raises:
            ValueError: as `Retriever.start` and `beam_search` do.
        """
        input_ids, attention_mask = self.retriever.padded(prompts)
        widths = checked_widths(beam_width, len(input_ids))
        planes = checked_planes(constraints, len(input_ids), self.index)
        modes = checked_normalise(normalise, len(input_ids))
        batch, length = input_ids.shape
        bucket = Bucket.of(batch, length, int(widths.max()), max_length=self.retriever.spec.max_length)
        graph = self._graphs.get(bucket)
        if graph is None:
            graph = self._graphs[bucket] = _Graph(self.retriever, self.index, bucket, self._pool)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(bucket)
        return finish(graph.run(input_ids, attention_mask, widths, planes, modes), widths)


class _Graph:
    """One bucket: the buffers that a batch is written to, and the search over them."""

    def __init__(self, retriever: Retriever, index: StaticIndex, bucket: Bucket, pool: tuple[int, int] | None):
        assert isinstance(retriever.engine, TorchEngine)
        self.engine, self.columns = retriever.engine, retriever.columns
        self.bucket, self.levels = bucket, index.num_levels
        device = self.engine.device
        self.input_ids = torch.zeros((bucket.batch, bucket.length), dtype=torch.int64, device=device)
        self.attention_mask = torch.ones_like(self.input_ids)
        widest = np.full(bucket.batch, bucket.beams, np.int32)
        self.steps = Search(index, widest, [None] * bucket.batch, any_planes=True)
        self.replay = self._levels if pool is None else self._captured(pool)

    def run(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray,
        widths: np.ndarray,
        planes: Sequence[Plane | None],
        modes: np.ndarray | None,
    ) -> Beams:
        """Search a batch of at most the bucket's size; waits for the result."""
        count, length = input_ids.shape
        # Rows beyond the batch hold one token, which a softmax needs, and one beam.
        host = np.zeros((2, *self.input_ids.shape), np.int64)
        host[1, count:, 0] = 1
        host[0, :count, :length], host[1, :count, :length] = input_ids, attention_mask
        filler = self.bucket.batch - count
        self.input_ids.copy_(torch.from_numpy(host[0]))
        self.attention_mask.copy_(torch.from_numpy(host[1]))
        modes = None if modes is None else np.append(modes, np.zeros(filler, np.int8))
        self.steps.restart(np.append(widths, np.ones(filler, np.int32)), [*planes, *[None] * filler], modes)
        self.replay()
        found = self.steps.result()
        return replace(found, **{name: array[:count] for name, array in vars(found).items() if array is not None})

    def _levels(self) -> None:
        """All levels over the buffers, waiting for nothing."""
        logits, log_z, state = self.engine.prefill(self.input_ids, self.attention_mask, self.columns[0])
        codes, parents = self.steps.step(0, logits, log_z)
        for level in range(1, self.levels):
            tokens, places = self.engine.beams(self.columns[level - 1], codes, parents)
            logits, log_z = self.engine.decode(state, tokens, places, self.columns[level])
            codes, parents = self.steps.step(level, logits, log_z)

    def _captured(self, pool: tuple[int, int]) -> Callable[[], None]:
        device = self.engine.device
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self._levels()
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Graphs may share memory in any order: what outlives a replay, the beams, lies outside the pool.
        # What other threads of the process do on the device, e.g. allocate, is theirs and must not end the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._levels()
        return graph.replay


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _rounded(n: int, least: int) -> int:
    """`n` rounded up to a multiple of an eighth of the power of two above it, at least of `least`."""
    step = max(least, _power(n) // 8)
    return -(-n // step) * step
