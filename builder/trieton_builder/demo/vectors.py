"""Item vectors of the demo: who watched a film, and its genres, reduced by a truncated SVD."""

import numpy as np

from trieton_builder.demo.movielens import MovieLens

DIMENSIONS = 64
GENRE_WEIGHT = 3.0  # of a genre beside one person


def item_vectors(data: MovieLens, *, dimensions: int = DIMENSIONS) -> np.ndarray:
    """Vectors float32 [num_items, dimensions] from the training part and the genres; nothing of the held-out films.

    A film's row is divided by the square root of its length, so that frequent films do not lie far from all others.
    """
    features = np.zeros((data.num_items, data.num_people + len(data.genre_names)))
    for person, history in enumerate(data.histories):
        features[history, person] = 1.0
    features[:, data.num_people :] = GENRE_WEIGHT * data.genres
    features /= np.sqrt(np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1.0))
    left, singular, right = np.linalg.svd(features, full_matrices=False)
    # A singular vector has no sign of its own; fix one, or another build of the library gives mirrored vectors.
    sign = np.sign(right[np.arange(len(right)), np.abs(right).argmax(axis=1)])
    return (left * singular * sign)[:, :dimensions].astype(np.float32)
