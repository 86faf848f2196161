"""The retriever's side of one beam search: keeps the time, and stops working for those who have left."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trieton.search.beam import BeamResult

CHECK_SECONDS = 0.01  # of search for each request asked after: a question is a message to the server, 40 microseconds
CANCELLED = "cancelled by the client"


class AllCancelledError(Exception):
    """Nobody waits for any result of this search."""


class Watch:
    """A session as the `next_logits` of `beam_search`.

    A request that is cancelled while its batch goes on loses its beams: no kernel looks at it any more. Its rows stay
    in the retriever's tensors to the end, because without them the last bit of the others' numbers can change: a sum
    over a row depends on where in memory the row begins (seen with ONNX Runtime).

    Args:
        places: what `cancelled` is asked with for each request of the batch.
        spend: (stage, started, **attributes) -> now, told of the seconds of each stage.
        started: when the prefill began.
    """

    def __init__(
        self,
        session: Any,
        places: Sequence[int],
        cancelled: Callable[[int], bool] | None,
        spend: Callable[..., float],
        started: float,
    ) -> None:
        self.session, self.places, self.cancelled, self.spend = session, places, cancelled, spend
        self.levels, self.level = 0, 0  # summed over requests; the last one
        self.left: list[int] = []
        self.waiting = deque(range(len(places)))  # who was asked after longest ago comes first
        self.asked, self.since = started, time.perf_counter()

    def __call__(self, level: int, codes: Any, parents: Any) -> tuple[Any, Any]:
        started = self.spend("step", self.since, level=level - 1) if level else self.since
        if self.cancelled is not None and started - self.asked > CHECK_SECONDS:
            self._ask(self.cancelled, int((started - self.asked) / CHECK_SECONDS))
        self.level = level
        logits, log_z = self.session(level, codes, parents)
        if self.left:
            # The contract of a step: a log_z of NaN ends its request and no other.
            log_z = log_z.copy() if isinstance(log_z, np.ndarray) else log_z.clone()
            log_z[self.left] = np.nan
        self.levels += len(self.waiting)
        self.since = self.spend("decode", started, level=level)
        return logits, log_z

    def finish(self, result: BeamResult) -> BeamResult:
        """Count the last step, and mark in the result who has left."""
        self.since = self.spend("step", self.since, level=self.level)
        for request in self.left:
            result.errors[request] = CANCELLED
        return result

    def _ask(self, cancelled: Callable[[int], bool], times: int) -> None:
        """Ask after requests in turn until so many still wait. Raises AllCancelledError."""
        for _ in range(len(self.waiting)):
            if times <= 0:
                break
            request = self.waiting.popleft()
            if cancelled(self.places[request]):
                self.left.append(request)
            else:
                self.waiting.append(request)
                times -= 1
        if not self.waiting:
            raise AllCancelledError
        self.asked = time.perf_counter()
