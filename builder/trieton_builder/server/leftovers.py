"""What a server leaves whose starter was killed: a folder of links, regions in /dev/shm, stubs; removed later.

The server itself is told to end when its starter dies. While it still loads a model it ends so abruptly that the stub
of that model lives on, for ever (seen).

A server's id names its starter's process, `trieton-PID-RANDOM`. Process ids mean nothing in another container that
shares /tmp, so the folder also holds the starter's process namespace, and only one of our own namespace may be swept.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
OWNER = "owner"
NAMESPACE = "/proc/self/ns/pid"


def mark(folder: Path) -> None:
    """Write down in a new folder who may sweep it."""
    (folder / OWNER).write_text(os.readlink(NAMESPACE))


def dead_folders() -> list[Path]:
    """Folders of servers whose starter, a process of this namespace, is gone. Its server has been told to end."""
    dead = []
    for folder in Path(tempfile.gettempdir()).glob("trieton-*-*-*"):
        pid = folder.name.split("-")[1]
        try:
            ours = (folder / OWNER).read_text() == os.readlink(NAMESPACE)
        except OSError:  # not such a folder, or being made or removed right now
            continue
        if ours and pid.isdigit() and not psutil.pid_exists(int(pid)):
            dead.append(folder)
    return dead


def environments() -> set[Path]:
    """Folders that the Python backends of running and killed servers made, always in /tmp. A server that ends itself
    removes its own, which does not say whose it is."""
    return set(Path("/tmp").glob("python_env_*"))


def sweep() -> None:
    """Remove what dead starters of this namespace left; a server that still answers its last requests keeps it."""
    for folder in dead_folders():
        name = folder.name.rpartition("-")[0]
        if any(f"--id={name}" in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])):
            continue
        remove_regions(f"{name}-")
        shutil.rmtree(folder, ignore_errors=True)


def remove_regions(prefix: str) -> None:
    """Remove the regions in /dev/shm of one server that has ended, and before them the stubs that hold them.

    Both stay behind when it is killed or crashes. A stub's program lies in the server's own folder, `prefix` and more.
    """
    for stub in psutil.process_iter(["cmdline"]):
        if f"/{prefix}" in (stub.info["cmdline"] or [""])[0]:
            with contextlib.suppress(psutil.Error):
                stub.kill()
    for region in SHM.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)
