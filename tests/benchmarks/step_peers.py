"""Other ways to search, for `bench_step.py`: without any constraint, and with other constraints, on the same tensors.

Every peer is a class with `levels(logits)`, a generator that yields after each level and returns (codes int64
[B, M, L], scores float32 [B, M]), so that the clock can read each level of each peer alike. All are torch and run on
any device where `device` says so.
"""

import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trieton.index.static_index import StaticIndex

Levels = Generator[None, None, tuple[Any, Any]]
NEG_INF = float("-inf")


def finish(levels: Levels) -> tuple[np.ndarray, np.ndarray]:
    """Run a search to its end."""
    while True:
        try:
            next(levels)
        except StopIteration as done:
            return tuple(t.cpu().numpy() if isinstance(t, torch.Tensor) else t for t in done.value)


class Masked:
    """The common frame: a score for every code of every beam, a mask over them, the best M of all."""

    exact = True
    device = "any"

    def __init__(self, beam: int):
        self.beam = beam

    def begin(self, batch: int, device: torch.device) -> None:
        """Forget the search before."""

    def mask(self, level: int, scores: torch.Tensor) -> torch.Tensor:
        """Lower the scores [B, M', V] of codes that are not allowed to -inf."""
        return scores

    def reorder(self, level: int, parents: torch.Tensor, codes: torch.Tensor) -> None:
        """The beams that survived; both int64 [B, M]."""

    def scores(self, level: int, logits: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits, 2).add_(before[:, :, None])

    def best(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(scores, parents, codes) [B, M] of the best."""
        width = scores.shape[2]
        top, place = scores.flatten(1).topk(min(self.beam, scores.shape[1] * width))
        return top, place // width, place % width

    def levels(self, logits: list[torch.Tensor]) -> Levels:
        batch = len(logits[0])
        self.begin(batch, logits[0].device)
        score = torch.zeros((batch, 1), device=logits[0].device)
        history = torch.empty((batch, 1, 0), dtype=torch.int64, device=logits[0].device)
        for level, rows in enumerate(logits):
            score, parents, codes = self.best(self.mask(level, self.scores(level, rows, score)))
            self.reorder(level, parents, codes)
            history = torch.cat([history.gather(1, parents[:, :, None].expand(-1, -1, level)), codes[:, :, None]], 2)
            yield
        return history, score


# ---- unconstrained


class OneStage(Masked):
    name = "log_softmax, one top-k"


class OneStageFused(Masked):
    """The normaliser goes into the one addition there is, so nothing of the size of the logits is written twice."""

    name = "logsumexp, one top-k"

    def scores(self, level: int, logits: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return logits + (before - logits.logsumexp(2))[:, :, None]


class TwoStage(OneStageFused):
    name = "top-k per beam, then of all"

    def best(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        each, code = scores.topk(min(self.beam, scores.shape[2]), sorted=False)
        top, place = each.flatten(1).topk(self.beam)
        return top, place // each.shape[2], code.flatten(1).gather(1, place)


class Argpartition(OneStageFused):
    name = "numpy argpartition"
    device = "cpu"

    def best(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = scores.flatten(1).numpy()
        place = np.argpartition(flat, -self.beam)[:, -self.beam :]
        top = np.take_along_axis(flat, place, 1)
        order = np.argsort(-top, axis=1)
        place = torch.from_numpy(np.take_along_axis(place, order, 1))
        return torch.from_numpy(np.take_along_axis(top, order, 1)), place // scores.shape[2], place % scores.shape[2]


# ---- constrained, on sorted semantic IDs


class PrefixSearch(Masked):
    """PPV: every code of every beam is looked up in the sorted IDs by binary search."""

    name = "PPV: binary search in the sorted IDs"

    def __init__(self, beam: int, codes: np.ndarray, device: torch.device):
        super().__init__(beam)
        self.columns = torch.from_numpy(np.ascontiguousarray(codes.T.astype(np.int16))).to(device)  # [L, N], sorted

    def begin(self, batch: int, device: torch.device) -> None:
        self.lo = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self.hi = torch.full((batch, 1), self.columns.shape[1], device=device)

    def mask(self, level: int, scores: torch.Tensor) -> torch.Tensor:
        column, width = self.columns[level], scores.shape[2]
        code = torch.arange(width + 1, device=scores.device)
        lo = self.lo[:, :, None].expand(-1, -1, width + 1)
        hi = self.hi[:, :, None].expand(-1, -1, width + 1)
        for _ in range(int((self.hi - self.lo).max()).bit_length()):
            middle = (lo + hi) // 2
            less = (lo < hi) & (column[middle.clamp(max=len(column) - 1)] < code)
            lo, hi = torch.where(less, middle + 1, lo), torch.where((lo < hi) & ~less, middle, hi)
        self.edges = lo
        return scores.masked_fill_(lo[:, :, 1:] <= lo[:, :, :-1], NEG_INF)

    def reorder(self, level: int, parents: torch.Tensor, codes: torch.Tensor) -> None:
        width = self.edges.shape[2]
        flat, place = self.edges.flatten(1), parents * width + codes
        self.lo, self.hi = flat.gather(1, place), flat.gather(1, place + 1)


class HashBitmap(Masked):
    """A bit per hashed prefix. Two prefixes may share a bit, so what it lets through need not exist."""

    name = "hash bitmap of prefixes (not exact)"
    exact = False
    BITS = 1 << 30

    def __init__(self, beam: int, codes: np.ndarray, device: torch.device):
        super().__init__(beam)
        bitmap = np.zeros(self.BITS // 8, np.uint8)
        state = np.zeros(len(codes), np.int64)
        for level in range(codes.shape[1]):
            state = self.hash(state, codes[:, level].astype(np.int64))
            place = np.unique(state)
            np.bitwise_or.at(bitmap, place >> 3, (1 << (place & 7)).astype(np.uint8))
        self.bitmap = torch.from_numpy(bitmap).to(device)

    def hash(self, state: Any, code: Any) -> Any:
        mixed = (state + 1) * 0x9E3779B1 + (code + 1) * 0x85EBCA6B
        return (mixed ^ (mixed >> 15)) & (self.BITS - 1)

    def begin(self, batch: int, device: torch.device) -> None:
        self.state = torch.zeros((batch, 1), dtype=torch.int64, device=device)

    def mask(self, level: int, scores: torch.Tensor) -> torch.Tensor:
        code = torch.arange(scores.shape[2], device=scores.device)
        self.next = self.hash(self.state[:, :, None], code)
        found = (self.bitmap[self.next >> 3] >> (self.next & 7).to(torch.uint8)) & 1
        return scores.masked_fill_(found == 0, NEG_INF)

    def reorder(self, level: int, parents: torch.Tensor, codes: torch.Tensor) -> None:
        self.state = self.next.flatten(1).gather(1, parents * self.next.shape[2] + codes)


class DictTrie(Masked):
    """A Python dict from prefix to children. Only what a search visits is filled in, before the clock starts."""

    name = "dict trie"
    device = "cpu"

    def __init__(self, beam: int, codes: np.ndarray):
        super().__init__(beam)
        self.codes = codes
        self.children: dict[tuple[int, ...], torch.Tensor] = {}

    def lookup(self, prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix not in self.children:
            lo, hi = 0, len(self.codes)
            for level, code in enumerate(prefix):
                column = self.codes[lo:hi, level]
                lo, hi = lo + int(np.searchsorted(column, code)), lo + int(np.searchsorted(column, code, "right"))
            self.children[prefix] = torch.from_numpy(np.unique(self.codes[lo:hi, len(prefix)]).astype(np.int64))
        return self.children[prefix]

    def begin(self, batch: int, device: torch.device) -> None:
        self.prefixes: list[list[tuple[int, ...]]] = [[()] for _ in range(batch)]

    def mask(self, level: int, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, NEG_INF)
        for b, beams in enumerate(self.prefixes):
            for m, prefix in enumerate(beams):
                allowed = self.lookup(prefix)
                masked[b, m, allowed] = scores[b, m, allowed]
        return masked

    def reorder(self, level: int, parents: torch.Tensor, codes: torch.Tensor) -> None:
        pairs = zip(self.prefixes, parents.tolist(), codes.tolist(), strict=True)
        self.prefixes = [[(*before[p], c) for p, c in zip(ps, cs, strict=True)] for before, ps, cs in pairs]


class HuggingFace(DictTrie):
    """`PrefixConstrainedLogitsProcessor`, asked as `generate` asks it, over the same dict."""

    name = "Hugging Face logits processor over it"

    def begin(self, batch: int, device: torch.device) -> None:
        super().begin(batch, device)
        from transformers import PrefixConstrainedLogitsProcessor

        beams = lambda level: 1 if level == 0 else self.beam  # noqa: E731
        self.processors = [
            PrefixConstrainedLogitsProcessor(
                lambda _, sent: self.lookup(tuple(sent.tolist())).tolist(), num_beams=beams(level)
            )
            for level in range(self.codes.shape[1])
        ]

    def mask(self, level: int, scores: torch.Tensor) -> torch.Tensor:
        flat = scores.flatten(0, 1)
        sent = torch.tensor(self.prefixes, dtype=torch.int64).reshape(len(flat), level)
        return self.processors[level](sent, flat).view_as(scores)


class MarisaTrie(DictTrie):
    """A succinct trie over strings of one character per code; children are read off the keys below a prefix."""

    name = "marisa-trie"

    def __init__(self, beam: int, codes: np.ndarray):
        super().__init__(beam, codes)
        import marisa_trie

        # Above the surrogates, so that every code is one character.
        shifted = np.ascontiguousarray(codes.astype(np.uint32) + 0x10000)
        text = shifted.view(f"U{codes.shape[1]}").reshape(-1)
        self.trie = marisa_trie.Trie(text.tolist())
        self.first = super().lookup(())  # asking for all keys once per search would be no contest

    def lookup(self, prefix: tuple[int, ...]) -> torch.Tensor:
        if not prefix:
            return self.first
        below: Iterable[str] = self.trie.keys("".join(chr(code + 0x10000) for code in prefix))
        return torch.tensor(sorted({ord(key[len(prefix)]) - 0x10000 for key in below}))


class Published:
    """The decoder of a checkout of youtube/static-constraint-decoding, its own builder and layout."""

    name = "published STATIC decoder"
    exact = True  # here; its best `tokens_per_beam` children of each beam are enough for these tensors
    device = "any"

    def __init__(self, beam: int, codes: np.ndarray, vocab: int, device: torch.device, checkout: Path):
        sys.path.insert(0, str(checkout))
        from static_decoding.csr_utils import build_static_index
        from static_decoding.decoding_pt import sparse_transition_torch

        csr, indptr, branches, start, mask, states = build_static_index(codes.astype(np.int32), vocab, 2)
        send = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)  # noqa: E731
        self.search, self.beam, self.vocab, self.device_here = sparse_transition_torch, beam, vocab, device
        self.branches = tuple(int(b) for b in branches)
        self.tables = tuple(map(send, (csr, indptr, start, mask, states)))

    def levels(self, logits: list[torch.Tensor]) -> Levels:
        """It cannot be halted between levels: the clock reads it when it asks its model for the next logits."""
        step = iter(logits)
        asked: list[float] = []

        def model(tokens: torch.Tensor) -> torch.Tensor:
            import time

            asked.append(time.perf_counter())
            return next(step).flatten(0, 1)[:, None]

        batch = len(logits[0])
        out = self.search(
            model, batch, self.beam, self.beam, 0, len(logits), self.vocab, self.branches, *self.tables,
            self.device_here, 2,
        )  # fmt: skip
        self.asked = asked
        yield
        return out, None


def sorted_codes(index: StaticIndex) -> np.ndarray:
    """Every semantic ID of the index in order, [N, L], a chunk at a time."""
    smallest = np.uint16 if max(index.codebook_sizes) <= 1 << 15 else np.int32
    out = np.empty((index.num_leaves, index.num_levels), smallest)
    for start in range(0, index.num_leaves, 1 << 20):
        stop = min(start + (1 << 20), index.num_leaves)
        out[start:stop] = index.leaf_codes(np.arange(start, stop))
    return out
