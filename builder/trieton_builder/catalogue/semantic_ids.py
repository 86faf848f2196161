"""Item vectors -> semantic IDs by residual k-means, with a last level that separates collisions.

Each level quantises what the levels before left over, so the first code is coarse and the next ones refine it; items
that still share all codes are numbered by the last level (Rajput et al., Recommender Systems with Generative Retrieval,
arXiv 2305.05065). The k-means is faiss's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import faiss
import numpy as np

ITERATIONS = 40
MAX_SEED = 2**31 - 64  # faiss takes 31 bits, and each level the next number


@dataclass(frozen=True)
class LevelQuality:
    """How well one level is used.

    Attributes:
        codes_used: codes that at least one item has.
        entropy: bits; log2 of the codebook size where all codes are equally frequent.
        error: squared error that is left after this level, as a share of the vectors' variance.
    """

    codes_used: int
    entropy: float
    error: float


@dataclass(frozen=True, eq=False)
class SemanticIds:
    """Semantic IDs of a catalogue.

    Attributes:
        codes: int32 [N, L]; no two rows are equal where the last level separates collisions.
        codebook_sizes: codes of each level, [L].
        levels: quality of the quantised levels, without the one that separates collisions.
        collisions: items that share their quantised codes with another item.
        largest_collision: items of the largest such group.
    """

    codes: np.ndarray
    codebook_sizes: tuple[int, ...]
    levels: tuple[LevelQuality, ...]
    collisions: int
    largest_collision: int


def semantic_ids(
    vectors: np.ndarray, codebook_sizes: Sequence[int], *, separate_collisions: bool = True, seed: int = 0
) -> SemanticIds:
    """Quantise `vectors` float32 [N, D]. The same vectors, sizes and seed give the same semantic IDs.

    Args:
        codebook_sizes: codes of each quantised level.
        separate_collisions: append a level that numbers the items of one semantic ID, in the order of rows; its size is
            that of the largest group, 1 where no items collide, so that the number of levels, which a retriever is
            trained for, does not depend on the items. Without it several items share a semantic ID.

    Raises:
        ValueError: vectors that are not finite float [N, D], fewer of them than the codes of a level, or a seed that
            is no positive number of 31 bits.
    """
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise ValueError(f"vectors: expected float [N, D], got {vectors.dtype} {vectors.shape}")
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        raise ValueError(f"vectors: row {int(np.argmin(finite))} is not finite")
    sizes = tuple(int(size) for size in codebook_sizes)
    if not sizes or min(sizes) < 1 or max(sizes) > len(vectors):
        raise ValueError(f"codebook_sizes: expected one per level, 1 to {len(vectors)} (the items), got {sizes}")
    if not 0 <= seed < MAX_SEED:
        raise ValueError(f"seed: expected 0 to {MAX_SEED - 1}, got {seed}")

    residual = np.ascontiguousarray(vectors - vectors.mean(axis=0), np.float32)
    variance = float((residual**2).sum()) or 1.0  # equal vectors leave nothing to quantise
    columns, levels = [], []
    with _one_thread():
        for level, size in enumerate(sizes):
            centroids, nearest = _kmeans(residual, size, seed + level)
            residual -= centroids[nearest]
            columns.append(nearest)
            shares = np.bincount(nearest, minlength=size) / len(nearest)
            used = shares[shares > 0]
            entropy = float(-(used * np.log2(used)).sum())
            levels.append(LevelQuality(len(used), entropy, float((residual**2).sum()) / variance))
    codes = np.stack(columns, axis=1).astype(np.int32)
    _, group, counts = np.unique(codes, axis=0, return_inverse=True, return_counts=True)
    if separate_collisions:
        codes = np.column_stack([codes, _rank_within(group.reshape(-1))]).astype(np.int32)
        sizes = (*sizes, int(counts.max()))
    return SemanticIds(codes, sizes, tuple(levels), int(counts[counts > 1].sum()), int(counts.max()))


def _kmeans(points: np.ndarray, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Centroids float32 [size, D] and the nearest of them int64 [N]."""
    quantiser = faiss.Kmeans(
        points.shape[1],
        size,
        niter=ITERATIONS,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=1024,
    )
    quantiser.train(points)
    centroids = np.asarray(quantiser.centroids)
    return centroids, quantiser.index.search(points, 1)[1][:, 0]


def _rank_within(group: np.ndarray) -> np.ndarray:
    """Place int64 [N] of each row among the rows of its group, in the order of rows."""
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    rank = np.empty(len(group), np.int64)
    rank[order] = np.arange(len(group)) - np.repeat(starts, np.diff(starts, append=len(group)))
    return rank


@contextmanager
def _one_thread() -> Iterator[None]:
    # Sums over several threads are added in another order on another machine, and a rounding can move an item.
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)
