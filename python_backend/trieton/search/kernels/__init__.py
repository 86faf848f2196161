"""One constrained beam step, three times with one signature.

    reference  the readable one, any device
    cpu        numba; the compiled part stands in cpu_step
    gpu        OpenAI Triton

Each module has a class `Search`, one object per call of `trieton.search.beam.beam_search`:

    search = Search(index, widths, planes, normalise)   # int32 [B], B planes or None, int8 [B] or None
    for level in range(index.num_levels):
        codes, parents = search.step(level, logits, log_z)      # both integer [B, M], -1 for a dead beam
        if not search.lives():
            break
    beams = search.result()

The step, in the words every kernel follows (M = the largest width, M' = 1 at level 0 and M after it):

    x[b, m, c] = float32(logits[b, m, c])                                          # exact: f32, f16 or bf16 come in
    log_z[b, m] = float32(logsumexp of float64(x)) over, as `normalise` of request b says,
        vocabulary: the whole row; unless log_z was handed over, which then stands
        level:      the codes of the level, and its end code
        allowed:    the candidates of this beam
    log_p[b, m, c] = min(0, x - log_z); -inf where x or log_z is -inf
    candidates of request b: children (m, c) of live beams that are in the trie and in the plane
    ended[b]: of all candidates until now that are whole semantic IDs (those with the end code; at the last level all)
        the best widths[b] by (score descending, level ascending, m ascending, c ascending)
    least[b]: the score of the last of ended[b] where they are widths[b], else -inf
    new beams of request b: of the other candidates with score[b, m] + log_p > least[b]
        the best widths[b] by (score[b, m] + log_p descending, m ascending, c ascending)

The result is `ended` behind the last level. So a semantic ID that has ended takes no place from a living beam, and a
beam that can no longer beat widths[b] of them dies: what it leads to has no larger score.

All of it in float32, so that kernels agree bit for bit. A candidate of score -inf does not exist. NaN or +inf in the
row of a live beam, or in a log_z handed over with it, fails the whole request: all its beams die, and it has no result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trieton.constraint.plane import Plane
from trieton.index.static_index import StaticIndex

NORMALISE = ("vocabulary", "level", "allowed")  # a kernel is handed places in this list
VOCABULARY, LEVEL, ALLOWED = range(3)


@dataclass(frozen=True, eq=False)
class Beams:
    """What a search ends with, on the host. B requests, M beams each, L levels.

    Attributes:
        scores: float32 [B, M], best first, -inf behind the last.
        codes: int32 [B, M, L], -1 behind the end of a short semantic ID and in unused rows.
        leaves: int64 [B, M], -1 in unused rows.
        bound: float32 [B], the highest score that found no room among the beams of a level, -inf where all found some.
            What died because enough had ended with a better score does not count: the result had no room for it.
        failed: int32 [B], the level whose logits held NaN or +inf, -1 where none did.
        ranked: int64 [B], candidates that had to be ranked, over all levels: those that the scores of better ones had
            not already ruled out when the kernel came to them. None from a kernel that does not count.
    """

    scores: np.ndarray
    codes: np.ndarray
    leaves: np.ndarray
    bound: np.ndarray
    failed: np.ndarray
    ranked: np.ndarray | None = None


class Search(Protocol):
    """What each kernel module offers under this name.

    Attributes:
        shape: requests and beams, (B, M).
    """

    shape: tuple[int, int]

    def __init__(
        self,
        index: StaticIndex,
        widths: np.ndarray,
        planes: Sequence[Plane | None],
        normalise: np.ndarray | None = None,
    ) -> None: ...

    def step(self, level: int, logits: Any, log_z: Any | None) -> tuple[Any, Any]:
        """Advance by one level.

        Args:
            logits: [B, M', at least index.width(level)], float32, float16 or bfloat16, any strides.
            log_z: float32 [B, M'], or None: the kernel normalises over the full width of `logits`.

        Returns:
            codes and parents [B, M], for the next call of the model; valid until the step after that.
        """

    def lives(self) -> bool:
        """Whether any beam lives after the last step. A kernel that would have to wait for a device may say True."""

    def result(self) -> Beams:
        """What has ended; to be called behind the last level, or when nothing lives."""
