"""Ctrl-C and SIGTERM: both end a command with what it began taken back, and neither may cut that short."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """A supervisor's SIGTERM, raised where Ctrl-C would be."""


def terminate(number: int, frame: FrameType | None) -> None:
    """The handler of SIGTERM of the command line."""
    raise Terminated


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """128 and the number of the signal, as shells count it."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


@dataclass
class Held:
    """Signals that have come while they were held back, in their order."""

    came: list[int] = field(default_factory=list)


@contextlib.contextmanager
def held_back() -> Iterator[Held]:
    """Hold both signals back while the block cleans up, and raise the first of them afterwards.

    A block that takes long looks at `came`, and hurries. What is ignored already stays ignored. Only the main thread
    may do this; in another one, which no signal interrupts, nothing changes.
    """
    held = Held()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # None: a handler that C code has set, which Python could not put back.
    mine = [number for number, handler in before.items() if handler not in (None, signal.SIG_IGN)]
    for number in mine:
        signal.signal(number, lambda came, frame: held.came.append(came))
    try:
        yield held
    finally:
        for number in mine:
            signal.signal(number, before[number])
        if held.came:
            signal.raise_signal(held.came[0])
