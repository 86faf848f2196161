"""The steps of a rollout as they are seen from outside: their names, times and how each ended."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepEvent:
    """Something that happened to a step.

    Attributes:
        step: its name, e.g. "verify".
        state: "begin", "end", "fail"; or "note" for something said while it runs.
        text: what it does, or what was said, or why it failed.
        seconds: what it took; 0 for "begin" and "note".
    """

    step: str
    state: str
    text: str
    seconds: float = 0.0


Listener = Callable[[StepEvent], None]


class Steps:
    """Runs named steps, tells a listener and keeps the times.

    The listener is called before and after each step; what it raises ends the rollout there, as any error would.
    """

    def __init__(self, listener: Listener | None = None):
        self.listener = listener or (lambda event: None)
        self.log: list[dict[str, Any]] = []
        self._current = ""

    @contextlib.contextmanager
    def step(self, name: str, text: str) -> Iterator[None]:
        self._current = name
        start = time.perf_counter()
        entry: dict[str, Any] = {"step": name, "text": text}
        self.log.append(entry)
        try:
            self.listener(StepEvent(name, "begin", text))
            yield
        except BaseException as error:
            entry |= {"seconds": round(time.perf_counter() - start, 3), "error": str(error) or type(error).__name__}
            self.listener(StepEvent(name, "fail", entry["error"], entry["seconds"]))
            raise
        entry["seconds"] = round(time.perf_counter() - start, 3)
        self.listener(StepEvent(name, "end", text, entry["seconds"]))

    def note(self, text: str) -> None:
        """Say something that is not a step of its own."""
        self.log.append({"step": self._current, "note": text})
        self.listener(StepEvent(self._current, "note", text))
