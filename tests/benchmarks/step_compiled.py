"""The fastest unconstrained search we can write for a CPU: our own compiled step without a trie.

Same normaliser, same pruning by the worst of the best, same threads; every code of a level is a child of every beam. So
what is left between this row and ours is the constraint and nothing else.
"""

import numpy as np
import torch
from numba import njit, prange
from step_peers import Levels
from trieton.search.kernels.cpu_step import BLOCK, LEAN, NEG_INF, _from_order, _log_normaliser, _push, _range, _rank


@njit(**LEAN)
def _scan(rows, score, log_z, best):
    threshold = NEG_INF
    for m in range(score.size):
        if score[m] <= threshold:
            break
        if threshold > NEG_INF:
            highest = _from_order(_range(rows[m])[1])
            if score[m] + min(np.float32(0), highest - log_z[m]) <= threshold:
                continue
        for start in range(0, rows.shape[1], BLOCK):
            block, passed = rows[m, start : start + BLOCK], np.int32(0)
            for i in range(block.size):
                passed = np.int32(passed + np.int32(score[m] + min(np.float32(0), block[i] - log_z[m]) > threshold))
            if passed == 0:
                continue
            for i in range(block.size):
                total = score[m] + min(np.float32(0), block[i] - log_z[m])
                if total > threshold:
                    threshold = _push(best, threshold, total, m, start + i, 0, 0)
    return _rank(best)


@njit(**LEAN)
def _keep(count, score, parents, codes, best):
    scores, found, _, slots, _ = best
    for i in range(count):
        score[i], parents[i], codes[i] = scores[slots[i]], found[slots[i], 0], found[slots[i], 1]


@njit(nogil=True, parallel=True)
def _step(logits, before, score, parents, codes, log_z, buffer, none):
    batch, beams, _ = logits.shape
    scores, found, keys, slots, counts = buffer
    for row in prange(batch * beams):
        b, m = row // beams, row % beams
        log_z[b, m] = _log_normaliser(logits[b, m], none)
    for b in prange(batch):
        counts[b, 0], counts[b, 1] = 0, score.shape[1]
        best = (scores[b], found[b], keys[b], slots[b], counts[b])
        count = _scan(logits[b], before[b, :beams], log_z[b], best)
        _keep(count, score[b], parents[b], codes[b], best)


@njit(nogil=True, **LEAN)
def _trace(codes, parents, out):
    for b in range(out.shape[0]):
        for i in range(out.shape[1]):
            m = i
            for level in range(out.shape[2] - 1, -1, -1):
                out[b, i, level] = codes[level, b, m]
                m = parents[level, b, m]


class Compiled:
    name = "our compiled step, no trie"
    exact = True
    device = "cpu"

    def __init__(self, batch: int, beam: int):
        room = 2 * beam
        self.buffer = (
            np.empty((batch, room), np.float32),
            np.empty((batch, room, 4), np.int64),
            np.empty((batch, room), np.int64),
            np.empty((batch, room), np.int32),
            np.zeros((batch, 3), np.int64),
        )
        self.shape = (batch, beam)
        self.log_z = np.empty((batch, beam), np.float32)

    def levels(self, logits: list[torch.Tensor]) -> Levels:
        score = np.zeros((2, *self.shape), np.float32)
        parents, codes = np.empty((2, len(logits), *self.shape), np.int64)
        none = np.zeros(0, np.float32)
        for level, rows in enumerate(logits):
            now = level % 2
            _step(
                rows.numpy(), score[1 - now], score[now], parents[level], codes[level], self.log_z, self.buffer,
                none,
            )  # fmt: skip
            yield
        out = np.empty((*self.shape, len(logits)), np.int64)
        _trace(codes, parents, out)
        return out, score[(len(logits) - 1) % 2]
