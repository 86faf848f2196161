"""Long calls into other people's code, such as a sort, that Ctrl-C and SIGTERM can leave within seconds."""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_STEP = 0.2  # seconds between two looks at a signal
PATIENCE = 5.0  # seconds that cancelled work has to end


def interruptible(
    work: Callable[[], T], *, cancel: Callable[[], object] | None = None, tick: Callable[[], object] | None = None
) -> T:
    """What `work` returns, computed in another thread: Python looks at signals only between its own instructions.

    An interrupt is raised here as soon as the work has ended, or after `PATIENCE` seconds, or at once where nothing
    can cancel it. What then still runs ends with the process, which does not wait for it.

    Args:
        cancel: asks the work to end; called until it has. More interrupts meanwhile change nothing.
        tick: called while waiting.
    """
    ended = threading.Event()  # not Thread.join: interrupted, it takes a thread that works on for ended (before 3.13)
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised again below, in the caller's thread
            failures.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()
    try:
        while not ended.wait(_STEP):
            if tick:
                tick()
    except BaseException:
        _end(ended, cancel)
        raise
    if failures:
        raise failures[0]
    return results[0]


def _end(ended: threading.Event, cancel: Callable[[], object] | None) -> None:
    latest = time.monotonic() + PATIENCE
    while cancel and not ended.is_set() and time.monotonic() < latest:
        with contextlib.suppress(Exception, KeyboardInterrupt):  # also what has just ended and cannot be cancelled
            cancel()
            ended.wait(_STEP / 2)
    if not ended.is_set():
        atexit.register(_leave, ended)


def _leave(ended: threading.Event) -> None:
    """End a process at once whose other thread still works: taking its objects apart could wait for it, or crash."""
    if not ended.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
