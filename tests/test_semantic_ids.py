"""Residual quantisation of item vectors."""

import faiss
import numpy as np
import pytest
from trieton_builder.catalogue.semantic_ids import semantic_ids


def clusters(count: int = 400, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((8, 16)) * 5
    return (centres[rng.integers(0, 8, count)] + rng.standard_normal((count, 16))).astype(np.float32)


def test_the_same_vectors_give_the_same_ids_whatever_the_threads():
    vectors = clusters()
    threads = faiss.omp_get_max_threads()
    try:
        runs = []
        for count in (1, 2, threads):
            faiss.omp_set_num_threads(count)
            runs.append(semantic_ids(vectors, (8, 8, 8)).codes)
            assert faiss.omp_get_max_threads() == count
    finally:
        faiss.omp_set_num_threads(threads)
    assert all(np.array_equal(runs[0], run) for run in runs)


def test_every_level_leaves_a_smaller_error_and_similar_items_share_the_first_code():
    vectors = clusters()
    ids = semantic_ids(vectors, (8, 8, 8))
    errors = [level.error for level in ids.levels]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.4  # eight clusters, eight codes: most of the variance lies between them
    assert all(0 < level.entropy <= 3 for level in ids.levels)
    assert ids.codes.dtype == np.int32
    assert (ids.codes < ids.codebook_sizes).all()


def test_the_last_level_separates_items_with_the_same_codes():
    vectors = np.repeat(clusters(20), 5, axis=0)
    ids = semantic_ids(vectors, (4, 4))
    assert len(np.unique(ids.codes, axis=0)) == 100
    assert ids.codebook_sizes[-1] == ids.largest_collision == ids.codes[:, -1].max() + 1
    assert ids.collisions == 100
    quantised = semantic_ids(vectors, (4, 4), separate_collisions=False)
    np.testing.assert_array_equal(quantised.codes, ids.codes[:, :2])


def test_items_without_a_collision_get_a_last_level_of_one_code():
    vectors = np.eye(6, dtype=np.float32) * np.arange(1, 7, dtype=np.float32)
    ids = semantic_ids(vectors, (6,))
    assert ids.codebook_sizes == (6, 1)
    assert ids.collisions == 0


@pytest.mark.parametrize("seed", [-1, 2**31 - 1, 10**30])
def test_a_seed_that_faiss_cannot_take_is_refused(seed):
    with pytest.raises(ValueError, match=rf"seed: expected 0 to \d+, got {seed}"):
        semantic_ids(clusters(20), (4, 4), seed=seed)


@pytest.mark.parametrize(
    ("vectors", "sizes", "text"),
    [
        (np.zeros((5, 2), np.int64), (2,), "expected float"),
        (np.zeros(5, np.float32), (2,), "expected float"),
        (np.array([[0.0], [np.nan]], np.float32), (1,), "row 1 is not finite"),
        (np.zeros((5, 2), np.float32), (6,), "1 to 5"),
        (np.zeros((5, 2), np.float32), (), "one per level"),
    ],
)
def test_bad_vectors_are_refused(vectors, sizes, text):
    with pytest.raises(ValueError, match=text):
        semantic_ids(vectors, sizes)
