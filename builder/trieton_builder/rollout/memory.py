"""What memory the process of a server may still take, as its own control group allows; not what this machine has."""

import socket
from collections.abc import Callable
from pathlib import Path

import psutil
from trieton.resources import available_memory, memory_limit

RESIDENT = 256 << 20  # bytes of a version's process beyond its files (210 MiB seen on a CPU)


def room(url: str) -> int | None:
    """Bytes that the server at host:port can still take; None where that is not known here.

    It is known for a server whose process can be seen from here. One in a container that publishes its port, or on
    another machine, has limits of its own that nobody tells.
    """
    process = server_process(url)
    return None if process is None else available_memory(pid=process.pid)


def keeps(url: str, size: int, previous: int, note: Callable[[str], None]) -> bool:
    """Whether version `previous` should stay resident beside a new one; tells why not, or what is not known.

    Args:
        size: bytes of the new version's files, most of which are mapped and so given back under pressure.
    """
    left, needed = room(url), size + 2 * RESIDENT
    if left is None:
        note(
            f"{url}: how much memory its server may take is not known here: version {previous} stays resident; "
            "--no-keep-previous if two do not fit"
        )
    elif left <= needed:
        note(
            f"{url}: little memory is left for the server, {left / 2**20:,.0f} MiB, expected {needed / 2**20:,.0f}: "
            f"version {previous} does not stay resident, and while versions change a process may be killed"
        )
    return left is None or left > needed


def server_process(url: str) -> psutil.Process | None:
    """The server that listens at host:port, if it is one of this machine that this process may look at."""
    host, _, port = url.rpartition(":")
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)}
        own = {address.address for each in psutil.net_if_addrs().values() for address in each}
        if not addresses & own:
            return None
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == int(port) and connection.pid:
                process = psutil.Process(connection.pid)
                return process if "tritonserver" in process.name() else None
    except (OSError, ValueError, psutil.Error):
        return None
    return None


def kills() -> int:
    """How many processes the kernel of this machine has killed for lack of memory since it started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def told(url: str, before: int) -> str:
    """That the kernel has killed for lack of memory since `kills` was `before`; empty where nothing is known of it."""
    process = server_process(url)
    if process is None or kills() == before:
        return ""
    limit = memory_limit(pid=process.pid)
    bound = "" if limit is None else f", where the server may take {limit / 2**20:,.0f} MiB"
    return f"meanwhile the kernel killed a process of this machine for lack of memory{bound}"
