"""Cores and memory as the control groups allow them: real groups where the machine lets us, written trees elsewhere."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cgroup import limit_cpu, limit_memory, real_group, run_in
from trieton import resources

MIB = 1 << 20
SEE = (
    "import json; from trieton import resources as r; "
    "print(json.dumps([r.cpu_limit(), r.usable_cores(), r.memory_limit(), r.available_memory(), r.total_memory()]))"
)


@pytest.mark.case("W27")
def test_a_process_in_a_real_group_sees_half_a_core_and_its_memory():
    with real_group("cpu") as cpu, real_group("memory") as memory:
        limit_cpu(cpu, 0.5)
        limit_memory(memory, 300 * MIB)
        seen = run_in([cpu, memory], sys.executable, "-c", SEE, check=True)
    limit, cores, most, available, total = json.loads(seen.stdout)
    assert (limit, cores, most, total) == (0.5, 1, 300 * MIB, 300 * MIB)
    assert 0 < available < 300 * MIB  # the interpreter itself is in it


def test_the_limits_of_another_process_are_those_of_its_own_group():
    with real_group("cpu") as cpu, real_group("memory") as memory:
        limit_cpu(cpu, 0.5)
        limit_memory(memory, 300 * MIB)
        other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        try:
            for _, folder in (cpu, memory):
                (folder / "cgroup.procs").write_text(str(other.pid))
            assert resources.cpu_limit(pid=other.pid) == 0.5
            assert resources.memory_limit(pid=other.pid) == 300 * MIB
            assert resources.available_memory(pid=other.pid) <= 300 * MIB
            assert resources.cpu_limit() != 0.5
        finally:
            other.communicate()


def tree(root: Path, *, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    """A machine written down: /proc/self/cgroup, mountinfo, and the files of the groups."""
    meminfo = "MemTotal: 1000000 kB\nMemFree: 1 kB\nMemAvailable: 800000 kB\n"
    everything = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts, "proc/meminfo": meminfo, **files}
    for name, text in everything.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"


@pytest.mark.case("W27")
@pytest.mark.parametrize(
    ("quota", "limit", "cores"),
    [
        ("50000 100000", 0.5, 1),
        ("150000 100000", 1.5, 1),
        ("max 100000", math.inf, None),
        ("6400000 100000", 64.0, None),
    ],
)
def test_version_two_inside_a_container(tmp_path, quota, limit, cores):
    root = tree(tmp_path, cgroup="0::/\n", mounts=V2, files={"sys/fs/cgroup/cpu.max": f"{quota}\n"})
    assert resources.cpu_limit(root=root) == limit
    assert resources.usable_cores(root=root) == min(len(os.sched_getaffinity(0)), cores or 64)


def test_the_smallest_limit_on_the_way_to_the_root_counts(tmp_path):
    groups = "sys/fs/cgroup/kubepods"
    root = tree(
        tmp_path,
        cgroup="0::/kubepods/pod1/container\n",
        mounts=V2,
        files={
            f"{groups}/cpu.max": "max 100000\n",
            f"{groups}/pod1/cpu.max": "150000 100000\n",
            f"{groups}/pod1/container/cpu.max": "400000 100000\n",
            f"{groups}/pod1/memory.max": "536870912\n",
            f"{groups}/pod1/memory.current": "436870912\n",
            f"{groups}/pod1/memory.stat": "anon 5\ninactive_file 50000000\n",
            f"{groups}/pod1/container/memory.max": "max\n",
        },
    )
    assert resources.cpu_limit(root=root) == 1.5
    assert resources.memory_limit(root=root) == 512 * MIB
    assert resources.available_memory(root=root) == 150_000_000
    assert resources.total_memory(root=root) == 512 * MIB


def test_version_one_of_a_container_that_sees_the_names_of_its_host(tmp_path):
    """Docker without a namespace of groups: the path is the host's, and the mount shows that group as its top."""
    mounts = "".join(
        f"{n} 31 0:{n} /docker/1f {point} ro - cgroup cgroup rw,{controllers}\n"
        for n, point, controllers in (
            (32, "/sys/fs/cgroup/cpu,cpuacct", "cpu,cpuacct"),
            (33, "/sys/fs/cgroup/my\\040memory", "memory"),
        )
    )
    memory = "sys/fs/cgroup/my memory"
    root = tree(
        tmp_path,
        cgroup="4:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n0::/\n",
        mounts=mounts,
        files={
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "75000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000\n",
            f"{memory}/memory.limit_in_bytes": "400000000\n",
            f"{memory}/memory.usage_in_bytes": "390000000\n",
            f"{memory}/memory.stat": "cache 1\ninactive_file 1\ntotal_inactive_file 40000000\n",
        },
    )
    assert resources.cpu_limit(root=root) == 1.5
    assert resources.memory_limit(root=root) == 400_000_000
    assert resources.available_memory(root=root) == 50_000_000


@pytest.mark.parametrize("path", ["/", "/../../elsewhere", "/docker/1f"])
def test_a_mount_that_does_not_show_our_group_still_has_the_containers_at_its_top(tmp_path, path):
    mounts = "40 31 0:40 /kubepods/pod1 /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n"
    root = tree(tmp_path, cgroup=f"0::{path}\n", mounts=mounts, files={"sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert resources.cpu_limit(root=root) == 0.5


def test_no_limit_where_none_is_written(tmp_path):
    unlimited = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    mounts = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    root = tree(tmp_path, cgroup="4:memory:/\n", mounts=mounts, files=unlimited)
    assert resources.memory_limit(root=root) is None
    assert resources.available_memory(root=root) == 800_000 * 1024
    bare = tree(tmp_path / "bare", cgroup="", mounts="", files={})
    assert (resources.cpu_limit(root=bare), resources.memory_limit(root=bare)) == (math.inf, None)
