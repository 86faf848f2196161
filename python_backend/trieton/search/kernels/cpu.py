"""The beam step on the CPU: the buffers of one search around the compiled step of `trieton.search.kernels.cpu_step`."""

import threading
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from trieton.constraint.plane import Plane
from trieton.index.static_index import StaticIndex
from trieton.search.kernels import Beams
from trieton.search.kernels.arrays import as_array, level_table, plane_table, rows
from trieton.search.kernels.cpu_step import advance, advance_parallel, trace

PARALLEL_WORK = 1 << 15  # logits of a step from which a second thread pays
NO_LOG_Z = np.zeros(0, np.float32)
# Not every threading layer of numba may be entered by two threads at once.
_one_at_a_time = threading.Lock()


class Search:
    """See `trieton.search.kernels`. Codes and parents of all levels are kept, so beams are never reordered.

    Args:
        threads: of a large step. One by default: threads wait for each other at the end of every step, and where
            something else runs on the cores that wait is many times the step.
    """

    def __init__(
        self,
        index: StaticIndex,
        widths: np.ndarray,
        planes: Sequence[Plane | None],
        normalise: np.ndarray | None = None,
        *,
        threads: int = 1,
    ) -> None:
        if not 1 <= threads <= numba.config.NUMBA_NUM_THREADS:
            raise ValueError(f"threads: expected 1 to {numba.config.NUMBA_NUM_THREADS}, got {threads}")
        self.threads = threads
        batch, levels, width = len(widths), index.num_levels, int(widths.max())
        self.shape = (batch, width)
        self.table = level_table(index)
        self.planes = np.array([plane_table(plane, index) for plane in planes], np.int64)  # [B, plane levels, 5]
        self.kept_alive = (index, planes)  # their memory is read by address
        self.score = np.zeros((batch, width), np.float32)
        self.lo, self.hi = np.zeros((2, batch, width), np.int64)
        self.lo[:, 0], self.hi[:, 0] = index.row_ptr[0]
        self.codes, self.parents = np.empty((2, levels, batch, width), np.int32)
        self.bound = np.full(batch, -np.inf, np.float32)
        self.failed = np.full(batch, -1, np.int32)
        room = 2 * width + 2
        self.buffer = (
            np.empty((batch, room), np.float32),  # scores
            np.empty((batch, room, 4), np.int64),  # parent, code, span
            np.empty((batch, room), np.int64),  # keys
            np.empty((batch, room), np.int32),  # places of the best, best first
            np.zeros((batch, 3), np.int64),  # how many there are, how many to keep, how many there ever were
        )
        log_z = np.empty((batch, width), np.float32)
        self.state = (self.score, self.lo, self.hi, self.codes, self.parents, log_z)
        modes = np.zeros(batch, np.int8) if normalise is None else np.ascontiguousarray(normalise, np.int8)
        self.limits = (np.ascontiguousarray(widths, np.int32), self.failed, self.bound, modes)
        early = width if index.has_end else 1
        self.ended = (
            np.empty((batch, early), np.float32),  # scores, best first
            np.empty((batch, early), np.int32),  # level of the end code
            np.empty((batch, early), np.int32),  # beam that it ended
            np.empty((batch, early), np.int64),  # leaf
            np.zeros(batch, np.int64),  # how many
        )

    def step(self, level: int, logits: Any, log_z: Any | None) -> tuple[np.ndarray, np.ndarray]:
        values, strides = rows(logits)
        batch, beams, width = logits.shape
        given = NO_LOG_Z if log_z is None else np.ascontiguousarray(as_array(log_z)).reshape(-1)
        # Even shares of whole requests need one round of the threads instead of two, and keep a row in one cache.
        by_request = batch % self.threads == 0 or batch >= 4 * self.threads
        arguments = (
            level, beams, width, by_request, values, strides, given, self.table, self.planes, self.state, self.buffer,
            self.limits, self.ended,
        )  # fmt: skip
        if self.threads == 1 or batch * beams * width < PARALLEL_WORK:
            advance(*arguments)
        else:
            with _one_at_a_time:
                before = numba.get_num_threads()
                numba.set_num_threads(self.threads)
                try:
                    advance_parallel(*arguments)
                finally:
                    numba.set_num_threads(before)
        return self.codes[level], self.parents[level]

    def lives(self) -> bool:
        return bool((self.lo[:, 0] < self.hi[:, 0]).any())  # beams are sorted, and the dead come last

    def result(self) -> Beams:
        out = np.empty((*self.score.shape, len(self.table)), np.int32)
        leaves, scores = np.empty(self.score.shape, np.int64), np.empty_like(self.score)
        trace(self.state, self.limits, self.ended, self.table, scores, out, leaves)
        return Beams(scores, out, leaves, self.bound, self.failed, self.buffer[4][:, 2])
