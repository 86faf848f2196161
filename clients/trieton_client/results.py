"""The answer to one history."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Results:
    """Items for one history, best first, without the server's padding.

    Attributes:
        item_ids: int64 [n], or an object array of `str` [n] where the catalogue has string ids.
        scores: summed log-probabilities, float32 [n], descending.
        codes: semantic IDs, int32 [n, num_levels]; -1 behind the end of a short one.
        num_results: n; fewer than asked for where not more items are allowed or within the beam.
        num_unknown: ids of the history that the catalogue does not have; they were skipped.
        certified: proven to be the true top of everything allowed, not only of the beam.
        bundle_id: the bundle that answered.
        model_version: the model version that answered.
        num_unknown_listed: the same for the ids of `include` and `exclude`; None from a server that does not say.
    """

    item_ids: np.ndarray
    scores: np.ndarray
    codes: np.ndarray
    num_results: int
    num_unknown: int
    certified: bool
    bundle_id: str
    model_version: str
    num_unknown_listed: int | None = None

    def __len__(self) -> int:
        return self.num_results

    def __iter__(self) -> Iterator[tuple[int | str, float]]:
        """(item id, score), best first."""
        return iter(zip(self.item_ids.tolist(), self.scores.tolist(), strict=True))
