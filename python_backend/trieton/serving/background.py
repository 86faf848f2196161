"""Starting a version behind the one that answers: at low priority, where the system lets a process take its own back.

A new version is initialised while the old one serves, often on the same cores. Niced, it takes what the old one leaves.
Who may not raise its priority again (no CAP_SYS_NICE, no RLIMIT_NICE) keeps the normal one throughout, because a server
that stays slow for ever is worse than one that is slow for a second.
"""

import contextlib
import os
import threading
from pathlib import Path

NICENESS = 10  # about a tenth of the weight of a normal thread


def enter() -> bool:
    """Lower the priority of this process's threads, and so of those they will start. Returns whether it was done."""
    allowed: list[bool] = []
    # On Linux niceness belongs to a thread, so a thread of its own can try the way back.
    trial = threading.Thread(target=lambda: allowed.append(_may_return()))
    trial.start()
    trial.join()
    if allowed != [True]:
        return False
    normal = os.getpriority(os.PRIO_PROCESS, 0)
    _set_all(normal + NICENESS)
    _normal.append(normal)
    return True


def leave() -> None:
    """Give every thread of this process its priority back."""
    if _normal:
        _set_all(_normal.pop())


_normal: list[int] = []


def _may_return() -> bool:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, before + 1)
        os.setpriority(os.PRIO_PROCESS, 0, before)
    except OSError:
        return False
    return True


def _set_all(niceness: int) -> None:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, int(task.name), niceness)
