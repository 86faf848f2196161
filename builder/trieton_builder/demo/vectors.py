"""Item vectors of the demo: who watched a film, and its genres, reduced by a truncated SVD."""

import numpy as np

from trieton_builder.demo.movielens import MovieLens

DIMENSIONS = 32
GENRE_WEIGHT = 1.0  # of a genre beside one person


def item_vectors(data: MovieLens, *, dimensions: int = DIMENSIONS) -> np.ndarray:
    """Unit vectors float32 [num_items, dimensions] from the training part and the genres, not from the held-out films.

    Long rows of frequent films are damped by their square root before the decomposition, which they would fill alone;
    afterwards only the direction counts, or all rare films would crowd around the origin and share their codes.
    """
    features = np.zeros((data.num_items, data.num_people + len(data.genre_names)))
    for person, history in enumerate(data.histories):
        features[history, person] = 1.0
    features[:, data.num_people :] = GENRE_WEIGHT * data.genres
    features /= np.sqrt(_lengths(features))
    left, singular, right = np.linalg.svd(features, full_matrices=False)
    # A singular vector has no sign of its own; fix one, or another build of the library gives mirrored vectors.
    sign = np.sign(right[np.arange(len(right)), np.abs(right).argmax(axis=1)])
    vectors = (left * singular * sign)[:, :dimensions]
    return (vectors / _lengths(vectors)).astype(np.float32)


def _lengths(rows: np.ndarray) -> np.ndarray:
    """Length of each row [N, 1]; 1 for rows that are all zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.where(lengths > 0, lengths, 1.0)
