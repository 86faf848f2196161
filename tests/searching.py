"""What the tests of the search share: catalogues, planes made by enumeration, and models driven prefix by prefix."""

import os
from collections.abc import Callable, Sequence

import numpy as np
import oracle
import torch
from trieton.constraint.plane import Plane
from trieton.index.static_index import StaticIndex
from trieton.search.beam import BeamResult

torch.set_num_threads(1)  # these tensors are tiny: threads would only wait for each other

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the gpu kernel runs on the CPU, slowly
KERNELS = ("torch", "cpu", "gpu") if INTERPRETED else ("torch", "cpu")
EXAMPLES = int(os.environ.get("TRIETON_EXAMPLES", "0"))  # more hypothesis examples than a quick run takes


class Stepper:
    """`next_logits` of one model per request: follows every beam's prefix, and puts NaN wherever nobody may look."""

    def __init__(
        self,
        models: Sequence[oracle.NextLogits],
        index: StaticIndex,
        *,
        width: Callable[[int], int] | None = None,
        finish: Callable[[np.ndarray], object] = torch.from_numpy,
    ):
        self.models, self.index, self.finish = list(models), index, finish
        self.width = width or index.width
        self.prefixes: list[list[oracle.Codes | None]] = []

    def restart(self, requests: np.ndarray) -> "Stepper":
        return Stepper([self.models[b] for b in requests], self.index, width=self.width, finish=self.finish)

    def __call__(self, level: int, codes: object, parents: object) -> object:
        if level == 0:
            self.prefixes = [[()] for _ in self.models]
        else:
            code, parent = np.asarray(codes), np.asarray(parents)
            assert ((code >= 0) == (parent >= 0)).all()
            self.prefixes = [
                [(*before[p], int(c)) if p >= 0 else None for c, p in zip(code[b], parent[b], strict=True)]
                for b, before in enumerate(self.prefixes)
            ]
        out = np.full((len(self.models), len(self.prefixes[0]), self.width(level)), np.nan, np.float32)
        for b, beams in enumerate(self.prefixes):
            for m, prefix in enumerate(beams):
                if prefix is not None and not has_ended(prefix, self.index):
                    out[b, m] = self.models[b](prefix)
        return self.finish(out)


def has_ended(prefix: oracle.Codes, index: StaticIndex) -> bool:
    return bool(prefix) and prefix[-1] == index.end_code(len(prefix) - 1)


def ends_of(index: StaticIndex) -> list[int]:
    """The end code of each level, -1 where there is none: what the oracle has to know of an index."""
    return [index.end_code(level) for level in range(index.num_levels)]


def leaf_tuples(index: StaticIndex) -> list[oracle.Codes]:
    """Every semantic ID by leaf, the end code standing where `StaticIndex` has it."""
    codes = index.leaf_codes(np.arange(index.num_leaves))
    return [tuple(int(c) if c >= 0 else index.end_code(i) for i, c in enumerate(row)) for row in codes]


def first_leaves(index: StaticIndex, plane_level: int) -> np.ndarray:
    """First leaf of each edge of a plane level, and the number of leaves."""
    if plane_level == index.head_levels:
        return np.arange(index.num_leaves + 1)
    at = np.arange(len(index.codes[plane_level]) + 1)
    for ptr in index.row_ptr[plane_level + 1 :]:
        at = ptr[at]
    return at


def plane_of(index: StaticIndex, leaves: np.ndarray, form: str) -> Plane:
    """A plane that allows the leaves of a bool mask, in one of the forms that kernels read."""
    levels = index.head_levels + (index.head_levels < index.num_levels)
    seen = np.concatenate([[0], np.cumsum(leaves)])
    alive = [np.diff(seen[first_leaves(index, level)]) > 0 for level in range(levels)]
    if form == "alive":
        held = tuple(np.flatnonzero(a).astype(np.int64) for a in alive)
        return Plane(bits=(None,) * levels, alive=held)
    if form == "dead":
        held = tuple(np.flatnonzero(~a).astype(np.int64) for a in alive)
        return Plane(bits=(None,) * levels, dead=held)
    if form == "bits":
        return Plane(bits=tuple(np.packbits(a, bitorder="little") for a in alive))
    assert form == "bits and dead"
    more = [a | (np.arange(len(a)) % 3 == 0) for a in alive]
    dead = tuple(np.flatnonzero(m & ~a).astype(np.int64) for a, m in zip(alive, more, strict=True))
    return Plane(bits=tuple(np.packbits(m, bitorder="little") for m in more), dead=dead)


def rows_of(result: BeamResult, b: int, index: StaticIndex) -> list[tuple[oracle.Codes, np.float32]]:
    """[(codes, score)] of request b as the oracle gives them, after checking padding and leaves."""
    n = int(result.num_valid[b])
    assert (result.scores[b, n:] == -np.inf).all()
    assert (result.codes[b, n:] == -1).all()
    assert (result.leaves[b, n:] == -1).all()
    assert (result.leaves[b, :n] >= 0).all()
    np.testing.assert_array_equal(index.leaf_codes(result.leaves[b, :n]), result.codes[b, :n])
    ends = ends_of(index)
    codes = np.where(result.codes[b, :n] < 0, ends, result.codes[b, :n])
    return [(tuple(map(int, row)), score) for row, score in zip(codes, result.scores[b, :n], strict=True)]


def assert_same(a: BeamResult, b: BeamResult) -> None:
    """Bit for bit, order included."""
    for name in ("scores", "codes", "leaves", "num_valid", "certified", "bound"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.errors == b.errors
