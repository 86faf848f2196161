"""A real control group for a test, where this machine lets us make one."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FILES = {
    "cpu": {1: "cpu.cfs_quota_us", 2: "cpu.max"},
    "memory": {1: "memory.limit_in_bytes", 2: "memory.max"},
}


@contextlib.contextmanager
def real_group(controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of a new group below our own; skips the test where there is none to be had."""
    parent = _own_group(controller)
    if parent is None:
        pytest.skip(f"no writable control group for {controller} on this machine")
    version, folder = parent
    group = folder / f"trieton-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no group may be made in {folder}: {error}")
    try:
        if not (group / FILES[controller][version]).exists():
            pytest.skip(f"{folder} does not hand {controller} to the groups below it")
        yield version, group
    finally:
        for _ in range(500):  # a process that has just ended may still count
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.01)


def limit_cpu(group: tuple[int, Path], cores: float) -> None:
    version, folder = group
    if version == 1:
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))
    else:
        (folder / "cpu.max").write_text(f"{int(cores * 100_000)} 100000")


def limit_memory(group: tuple[int, Path], size: int) -> None:
    version, folder = group
    (folder / FILES["memory"][version]).write_text(str(size))


def run_in(groups: list[tuple[int, Path]], *command: str, **options) -> subprocess.CompletedProcess[str]:
    """Run a command that lies in `groups` from its first instruction."""
    enter = (
        "import os, sys\n"
        "for folder in sys.argv[1].split(':'): open(folder + '/cgroup.procs', 'w').write('0')\n"
        "os.execvp(sys.argv[2], sys.argv[2:])"
    )
    folders = ":".join(str(folder) for _, folder in groups)
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", enter, folders, *command], capture_output=True, text=True, **options
    )


def _own_group(controller: str) -> tuple[int, Path] | None:
    """Where our own process lies, by the fixed places of the two versions; the product's reader is not asked."""
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for number, controllers, path in own:
        if controller in controllers.split(","):
            folder = Path("/sys/fs/cgroup") / controllers / path.lstrip("/")
            if os.access(folder, os.W_OK):
                return 1, folder
        elif number == "0":
            folder = Path("/sys/fs/cgroup") / path.lstrip("/")
            with contextlib.suppress(OSError):
                if controller in (folder / "cgroup.subtree_control").read_text().split():
                    return 2, folder
    return None
