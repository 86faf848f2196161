"""What this machine has and lacks for the server, each finding with what to do about it."""

import base64
import hashlib
import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trieton.resources import available_memory, cpu_limit, memory_limit, total_memory, usable_cores
from trieton_client.address import PROXY_VARIABLES

from trieton_builder.server import installation
from trieton_builder.server.checks import PortTakenError, choose_ports
from trieton_builder.server.installation import InstallationError
from trieton_builder.server.leftovers import SHM, dead_folders, sweep
from trieton_builder.server.process import SHM_BYTES, TritonServer

MIB = 1 << 20
DEFAULT_PORTS = (8000, 8001, 8002)
RUNTIME = ("numpy", "torch", "onnxruntime", "numba", "safetensors", "lark")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        check: what was looked at.
        status: "ok"; "note" for something optional or worth knowing; "fail" for what keeps the server from working.
        text: what was found.
        remedy: what to do, empty when nothing is to do.
    """

    check: str
    status: str
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def examine(folder: Path = Path(), *, start: bool = True) -> Iterator[Finding]:
    """Yield the findings one by one, quick ones first.

    Args:
        folder: where bundles and repositories will lie; its disk is looked at.
        start: also start the real server on a trivial Python model, the proof of all the rest (about 5 s).
    """
    yield _python()
    yield _attempt("server wheel", _wheel)
    yield _attempt("stub", lambda: str(installation.find_stub(installation.wheel_folder())))
    yield _attempt("libpython", lambda: str(installation.find_libpython()))
    yield _attempt("numpy", installation.check_numpy)
    packages = _packages()
    yield packages
    if packages.status == "ok":
        yield _compiled_code()
    yield _shared_memory()
    yield _leftovers()
    yield _ports()
    yield _proxy()
    yield _disk(folder)
    yield _cores()
    yield _memory()
    yield _optional("Java", "java", ["-version"], "only the Spark build needs it: a JRE, 17 or newer")
    yield _optional("GPU", "nvidia-smi", ["-L"], "none is needed; with one: the container of deploy/Dockerfile")
    if start:
        yield _start()


def _attempt(check: str, find: Callable[[], str]) -> Finding:
    try:
        return Finding(check, "ok", find())
    except InstallationError as error:
        return Finding(check, "fail", error.found, error.remedy)


def _python() -> Finding:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return Finding("Python", "fail", text, "the server's wheel is for Linux x86-64; elsewhere use docker compose")
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        return Finding("Python", "fail", text, "make the environment with another: make PYTHON=python3.11 setup")
    return Finding("Python", "ok", text)


def _wheel() -> str:
    """Every byte of the wheel's server files against the hashes of its own record."""
    root = installation.wheel_folder()
    installation.check_wheel_sizes()
    for file in installation.wheel_files():
        path = Path(str(file.locate()))
        if file.hash is not None:
            digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                raise InstallationError(f"damaged wheel: {path} is not what the wheel brought")
    version = importlib.metadata.version(installation.WHEEL)
    if version != installation.WHEEL_VERSION:
        raise InstallationError(f"{installation.WHEEL} {version}, tried with {installation.WHEEL_VERSION}")
    return f"{installation.WHEEL} {version} in {root}"


def _packages() -> Finding:
    versions = {}
    for name in RUNTIME:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    missing = [name for name, version in versions.items() if not version]
    if missing:
        return Finding("packages", "fail", f"missing: {', '.join(missing)}", "pip install '.[runtime]' in the checkout")
    return Finding("packages", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage(SHM)
    except OSError as error:
        return Finding("shared memory", "fail", f"{SHM}: {error.strerror}", f"mount -t tmpfs tmpfs {SHM}")
    text = f"{usage.free // MIB:,} MiB of {usage.total // MIB:,} MiB free in {SHM}"
    # A version, the next one while it takes over, and the preflight of a publication.
    if usage.free < 3 * SHM_BYTES or not os.access(SHM, os.W_OK):
        return Finding("shared memory", "fail", text, "enlarge it (Docker: --shm-size=1g): requests go through it")
    if usage.free < 256 * MIB:
        return Finding("shared memory", "note", text, "enough for few instances; Docker: --shm-size=1g")
    return Finding("shared memory", "ok", text)


def _leftovers() -> Finding:
    """What servers left whose starter was killed; the next start of a server removes it too."""
    dead = dead_folders()
    sweep()
    return Finding("leftovers", "ok", f"removed what {len(dead)} killed starter(s) left" if dead else "none")


def _ports() -> Finding:
    try:
        choose_ports((None, None, None))
    except PortTakenError as error:
        return Finding("ports", "fail", str(error), "this machine has no loopback network: ip link set lo up")
    taken = []
    for port in DEFAULT_PORTS:
        try:
            choose_ports((port, None, None))
        except PortTakenError:
            taken.append(str(port))
    if taken:
        return Finding(
            "ports", "note", f"in use: {', '.join(taken)}", "trieton serve --http-port 8010 ..., or 0 for a free one"
        )
    return Finding("ports", "ok", "8000, 8001, 8002 free on loopback")


def _proxy() -> Finding:
    """What the environment says about proxies, and who follows it."""
    found = [name for name in PROXY_VARIABLES if name in os.environ]
    if not found:
        others = sorted(name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy"))
        return Finding("proxy", "ok", f"gRPC ignores {', '.join(others)}" if others else "none")
    # A password in it must not be shown.
    shown = ", ".join(f"{name}={os.environ[name].rpartition('@')[2] or '(empty)'}" for name in found)
    if not os.environ[found[0]]:
        return Finding("proxy", "ok", f"{shown}: {found[0]} is empty, so gRPC goes without one")
    return Finding(
        "proxy",
        "note",
        f"{shown}: gRPC to other machines goes through the proxy of {found[0]}, to this one it does not",
        "no_proxy=HOST leaves a server out",
    )


def _disk(folder: Path) -> Finding:
    free = {path: shutil.disk_usage(path).free for path in (folder.absolute(), Path(tempfile.gettempdir()))}
    text = ", ".join(f"{size / MIB / 1024:.1f} GiB free at {path}" for path, size in free.items())
    if min(free.values()) < 512 * MIB:
        return Finding("disk", "fail", text, "make room: a publish needs the bundle twice; TMPDIR moves temporary data")
    if min(free.values()) < 4096 * MIB:
        return Finding("disk", "note", text, "little for large catalogues: trieton prune removes old versions")
    return Finding("disk", "ok", text)


def _memory() -> Finding:
    """Of the container where it is limited: the machine's own is no help there."""
    limit, available = memory_limit(), available_memory()
    text = f"{available // MIB:,} of {total_memory() // MIB:,} MiB available"
    if limit is not None:
        text += f" (limit of the control group: {limit // MIB:,} MiB)"
    if available < 1024 * MIB:
        return Finding("memory", "note", text, "while versions change two of them are resident")
    return Finding("memory", "ok", text)


def _cores() -> Finding:
    affinity, quota, usable = len(os.sched_getaffinity(0)), cpu_limit(), usable_cores()
    quota_text = "no quota" if math.isinf(quota) else f"quota of the control group: {quota:g}"
    text = f"{usable} usable of {os.cpu_count()} ({affinity} in the affinity mask, {quota_text})"
    if quota < 1:
        return Finding("cores", "note", text, "below one core the server stands still in each period; give it one")
    return Finding("cores", "ok", text)


def _compiled_code() -> Finding:
    """Where Numba keeps it. Asked in a process of its own: nobody else pays for the import of a compiler."""
    program = "from trieton.compiled import cache_place; print(cache_place() or '')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Finding("compiled code", "fail", f"Numba does not run: {last}", "pip install --force-reinstall numba")
    if place := done.stdout.strip():
        return Finding("compiled code", "ok", f"kept in {place}")
    said = done.stderr.strip().rpartition(": ")[2] or "no folder for it may be written"
    remedy = "each start compiles for seconds; name a folder of your own in NUMBA_CACHE_DIR"
    return Finding("compiled code", "note", said, remedy)


def _optional(check: str, program: str, arguments: list[str], remedy: str) -> Finding:
    path = shutil.which(program)
    if path is None:
        return Finding(check, "note", "not found (optional)", remedy)
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(check, "note", f"{path} does not run: {error}", remedy)
    lines = (done.stdout + done.stderr).strip().splitlines() or [path]
    return Finding(check, "ok" if done.returncode == 0 else "note", lines[0], "" if done.returncode == 0 else remedy)


def _start() -> Finding:
    """Start the real server on a Python model that imports what a bundle needs."""
    with tempfile.TemporaryDirectory(prefix="trieton-doctor-") as folder:
        version = Path(folder) / "probe" / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(_PROBE_CONFIG)
        (version / "model.py").write_text(_PROBE_MODEL)
        try:
            with TritonServer(folder, load=("probe",), start_timeout=60) as server:
                return Finding("server", "ok", f"started and ran a Python model, process {server.pid}")
        except OSError as error:
            first, *rest = str(error).splitlines()
            return Finding("server", "fail", first, rest[-1] if rest else "see the findings above")


_PROBE_CONFIG = """backend: "python"
input [{ name: "x" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "y" data_type: TYPE_INT32 dims: [1] }]
instance_group [{ kind: KIND_CPU }]
"""
_PROBE_MODEL = """import numpy, trieton

class TritonPythonModel:
    def execute(self, requests):
        return [None for _ in requests]
"""
