"""What a rollout asks of a filesystem: durable writes and an exclusive lock, also where it has neither.

Network filesystems and FUSE may not know `flock`, or refuse to sync a folder (EINVAL).
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from trieton_builder.rollout.errors import LockedError
from trieton_builder.server.leftovers import NAMESPACE

UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
PAUSE = 0.05  # seconds between two looks at a lock that another process holds


def sync(descriptor: int) -> bool:
    """Make a file or a folder durable. False where the filesystem knows no such thing; a broken disk still raises.

    Nothing is lost by going on without it but what a power cut would take: each step is still one rename, and a server
    compares every checksum when it loads a version.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def sync_folder(folder: Path) -> bool:
    """Make the names in a folder durable. False where the filesystem cannot."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return sync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(path: Path, what: str, wait: float, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock at `path`. The kernel frees it when its holder dies; without `flock` a file stands for it.

    Args:
        what: what the holder does, for the error of another one.
        wait: seconds to wait for it.
        note: told where there is no `flock`.

    Raises:
        LockedError: another process still holds it.
    """
    deadline = time.monotonic() + wait
    # O_RDWR without truncation: the file names its holder to those who wait.
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = file.read().strip() or "another process"
                    raise LockedError(
                        f"{holder} is {what}; try again when it is done, or wait for it with --wait"
                    ) from None
                time.sleep(PAUSE)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                held = path.with_name(f"{path.name}.held")
                note(f"{held} stands for the lock, because this filesystem has none ({error.strerror})")
                with _held_by_file(held, what, deadline):
                    yield
                return
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


@contextlib.contextmanager
def _held_by_file(path: Path, what: str, deadline: float) -> Iterator[None]:
    """A lock that is the existence of a file, which only one process can make."""
    mine = {
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "host": socket.gethostname(),
        "namespace": os.readlink(NAMESPACE),
    }
    while True:
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as file:
                json.dump(mine, file)
            break
        except FileExistsError:
            holder = _read(path)
            if holder is not None and _is_dead(holder, mine):
                _take_away(path, holder)
            elif time.monotonic() > deadline:
                who = "another process" if not holder else f"process {holder.get('pid')} on {holder.get('host')}"
                raise LockedError(
                    f"{who} is {what}; try again when it is done, or wait for it with --wait; if it is gone for sure, "
                    f"remove {path}"
                ) from None
            else:
                time.sleep(PAUSE)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    """Who holds a lock file; None where that cannot be said: it is just being made or let go."""
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _is_dead(holder: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether the holder is a process of this machine and namespace that has ended. Others cannot be judged here."""
    if (holder.get("host"), holder.get("namespace")) != (mine["host"], mine["namespace"]):
        return False
    try:
        return abs(psutil.Process(holder["pid"]).create_time() - holder["started"]) > 1
    except (psutil.Error, KeyError):
        return True


def _take_away(path: Path, holder: dict[str, Any]) -> None:
    """Remove the lock file of a dead holder, and of no other: two processes may find it at once."""
    aside = path.with_name(f"{path.name}.dead-{os.getpid()}-{time.monotonic_ns()}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if _read(aside) == holder:
            aside.unlink()
        else:  # somebody took it between our look and the rename
            os.rename(aside, path)
