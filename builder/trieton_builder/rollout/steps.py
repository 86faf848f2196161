"""The steps of a rollout as they are seen from outside: their names, times and how each ended."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trieton_builder.rollout.errors import say_also


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


def numbers(versions: list[int]) -> str:
    """ "version 3 is" or "versions 3, 4 and 5 are", for the sentences that say what became of them."""
    *first, last = map(str, versions)
    return f"versions {', '.join(first)} and {last} are" if first else f"version {last} is"


@contextlib.contextmanager
def telling(withdrawn: list[int]) -> Iterator[None]:
    """Let an error also name the versions of killed publishers that were withdrawn before it."""
    try:
        yield
    except BaseException as error:
        if withdrawn:
            say_also(error, f"{numbers(withdrawn)} withdrawn, left by a killed publisher")
        raise
