"""What this process may use of its machine: cores and memory, as its container allows, not as the host has them.

Linux limits a container through control groups, of which two versions are in use, also side by side. A process lies in
one group of each hierarchy (`/proc/self/cgroup`); a group inherits the limits of all groups above it, so the smallest
one counts. `/proc/self/mountinfo` says where a hierarchy is mounted, and which of its groups is the top of the mount:
inside a container that is usually the container's own group.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 where there is no limit


def usable_cores(*, root: Path = ROOT) -> int:
    """Threads that can really run side by side, at least 1: the cores of the affinity mask, bounded by the quota.

    Half a core counts as one, one and a half as one: a thread more than the quota would stop all of them for the rest
    of each period.
    """
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), cpu_limit(root=root))))


def cpu_limit(*, pid: int | None = None, root: Path = ROOT) -> float:
    """Cores that the quota allows, as 0.5; infinity where there is none.

    Args:
        pid: another process of this machine; None is this one.
        root: where `proc` and the mount points are looked for.
    """
    limit = math.inf
    for version, folder in _groups("cpu", pid, root):
        if version == 1:
            quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        else:
            quota, period = ([*_numbers(folder / "cpu.max"), None, None])[:2]
        if quota is not None and quota > 0 and period:
            limit = min(limit, quota / period)
    return limit


def memory_limit(*, pid: int | None = None, root: Path = ROOT) -> int | None:
    """Bytes that the groups of a process may hold; None where they are not limited. Arguments as `cpu_limit`."""
    limits = [limit for _, limit in _memory_groups(pid, root)]
    return min(limits, default=None)


def available_memory(*, pid: int | None = None, root: Path = ROOT) -> int:
    """Bytes that a process can still take without swapping or being killed. Arguments as `cpu_limit`.

    The kernel's own estimate for the machine, bounded by what is left in each group. Pages of files that have not been
    touched for a while count as free in both: the kernel drops them first.
    """
    available = _machine_memory("MemAvailable", root)
    for folder, limit in _memory_groups(pid, root):
        used = _number(folder / "memory.current")
        idle = "inactive_file"
        if used is None:
            used, idle = _number(folder / "memory.usage_in_bytes"), "total_inactive_file"
        available = min(available, max(0, limit - (used or 0) + _entry(folder / "memory.stat", idle)))
    return available


def total_memory(*, root: Path = ROOT) -> int:
    """Bytes of the machine, or the limit of this process where that is smaller."""
    machine, limit = _machine_memory("MemTotal", root), memory_limit(root=root)
    return machine if limit is None else min(machine, limit)


def _memory_groups(pid: int | None, root: Path) -> Iterator[tuple[Path, int]]:
    """Folder and limit in bytes of every group that has one."""
    for version, folder in _groups("memory", pid, root):
        limit = _number(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max"))
        if limit is not None and limit < UNLIMITED:
            yield folder, limit


def _groups(controller: str, pid: int | None, root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of the group of a process for `controller` and of every group above it that can be seen."""
    own = {1: None, 2: None} | dict(_own_groups(controller, pid, root))
    for version, top, point in _mounts(controller, root):
        path = own[version]
        if path is None:
            continue
        seen = ".." not in path and Path(path).is_relative_to(top)
        if not seen and pid is not None:
            continue  # the mount shows other groups than that process's
        # A mount that does not show where this process lies still has its container's group at the top.
        inside = Path(path).relative_to(top).parts if seen else ()
        for depth in range(len(inside), -1, -1):
            yield version, point.joinpath(*inside[:depth])


def _own_groups(controller: str, pid: int | None, root: Path) -> Iterator[tuple[int, str]]:
    """(version, path of the group in its hierarchy), from lines such as `4:cpu,cpuacct:/docker/1f` and `0::/pod`."""
    for line in _lines(root / "proc" / ("self" if pid is None else str(pid)) / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield 2, path
        elif controller in controllers.split(","):
            yield 1, path


def _mounts(controller: str, root: Path) -> Iterator[tuple[int, str, Path]]:
    """(version, group at the top of the mount, folder) of every mounted hierarchy that has `controller`."""
    for line in _lines(root / "proc" / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        kind, *rest = after.split(" ")
        top, point = (_unescaped(field) for field in before.split(" ")[3:5])
        if kind == "cgroup2":
            yield 2, top, root / point.lstrip("/")
        elif kind == "cgroup" and controller in rest[-1].split(","):
            yield 1, top, root / point.lstrip("/")


def _unescaped(field: str) -> str:
    """A path of mountinfo, where a space is written `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _lines(path: Path) -> list[str]:
    """Lines of a file; none where there is no such file (another system, a hidden /proc)."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="surrogateescape").splitlines()
    return []


def _numbers(path: Path) -> list[int | None]:
    """The numbers of a file's first line; None for `max`."""
    words = " ".join(_lines(path)[:1]).split()
    return [int(word) if word.lstrip("-").isdigit() else None for word in words]


def _number(path: Path) -> int | None:
    return next(iter(_numbers(path)), None)


def _entry(path: Path, name: str) -> int:
    """The number behind `name` in a file of names and numbers; 0 where it is not there."""
    for line in _lines(path):
        key, *values = line.split()
        if key.rstrip(":") == name and values:
            return int(values[0])
    return 0


def _machine_memory(name: str, root: Path) -> int:
    path = root / "proc" / "meminfo"
    size = 1024 * _entry(path, name)
    if not size:
        raise OSError(f"{path}: no {name}; /proc has to be mounted")
    return size
