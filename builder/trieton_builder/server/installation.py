"""Where the real server of the wheel `nvidia-pytriton` lies on this machine, and what it needs to run.

Every function here either returns what it found or raises `InstallationError` with one line that says what to do.
`trieton doctor` and `trieton_builder.server.process` share them.
"""

import ctypes.util
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

WHEEL = "nvidia-pytriton"
WHEEL_VERSION = "0.7.0"
REINSTALL = f"pip install --force-reinstall --no-deps {WHEEL}=={WHEEL_VERSION}"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


class InstallationError(OSError):
    """Something the server needs is missing or damaged on this machine.

    Attributes:
        found: what is wrong.
        remedy: what to do about it.
    """

    def __init__(self, found: str, remedy: str = REINSTALL):
        super().__init__(f"{found}; {remedy}")
        self.found, self.remedy = found, remedy


@dataclass(frozen=True)
class Installation:
    """The pieces of the server for the running Python."""

    binary: Path
    backend: Path
    """Folder of `libtriton_python.so` and `triton_python_backend_utils.py`."""
    stub: Path
    """The process that runs a Python model, built for one minor version of Python."""
    libpython: Path


def find_installation() -> Installation:
    """Locate the server, its Python backend, the stub for the running Python and libpython.

    Raises:
        InstallationError: the wheel is not installed or damaged, has no stub for this Python, or libpython is missing.
    """
    root = wheel_folder()
    check_wheel_sizes()
    return Installation(
        binary=root / "bin" / "tritonserver",
        backend=root / "backends" / "python",
        stub=find_stub(root),
        libpython=find_libpython(),
    )


def link_backend(installation: Installation, folder: Path) -> None:
    """A backend directory of links: the wheel keeps the stubs apart, the server wants one beside the library."""
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    for path in (*installation.backend.glob("*.so"), *installation.backend.glob("*.py"), installation.stub):
        (backend / path.name).symlink_to(path)


def wheel_folder() -> Path:
    """The folder `pytriton/tritonserver`, found without importing the package (its import costs half a second)."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise InstallationError(
            f"the server is not installed in {sys.prefix}",
            f"pip install '.[server]' in the checkout (the wheel {WHEEL}=={WHEEL_VERSION})",
        )
    return Path(spec.origin).parent / "tritonserver"


def wheel_files() -> list[importlib.metadata.PackagePath]:
    """Files of the wheel's own record that the server needs (binary, backend, stubs, bundled libraries)."""
    try:
        files = importlib.metadata.files(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        files = None
    if not files:
        raise InstallationError(f"damaged wheel: {WHEEL} has no file list")
    needed = ("pytriton/tritonserver/", "nvidia_pytriton.libs/")
    return [file for file in files if str(file).startswith(needed) and file.size is not None]


def check_wheel_sizes() -> None:
    """Refuse a wheel of which a file is missing or cut short. Compares sizes only; the doctor compares hashes."""
    for file in wheel_files():
        path = Path(str(file.locate()))
        if not path.is_file():
            raise InstallationError(f"damaged wheel: {path} is missing")
        if path.stat().st_size != file.size:
            raise InstallationError(f"damaged wheel: {path} has {path.stat().st_size:,} bytes, expected {file.size:,}")
    binary = wheel_folder() / "bin" / "tritonserver"
    if not os.access(binary, os.X_OK):
        raise InstallationError(f"damaged wheel: {binary} may not be executed")


def find_stub(root: Path) -> Path:
    """The stub built for the running Python."""
    stubs = root / "python_backend_stubs"
    stub = stubs / PYTHON / "triton_python_backend_stub"
    if not stub.is_file():
        have = sorted((path.name for path in stubs.glob("3.*")), key=lambda name: int(name.split(".")[1]))
        raise InstallationError(
            f"no stub for Python {PYTHON} in {stubs} (there: {', '.join(have) or 'none'})",
            f"use Python 3.10 to 3.12, or, if this one should be there: {REINSTALL}",
        )
    return stub


def find_libpython() -> Path:
    """The shared libpython that the stub loads: beside this Python, on LD_LIBRARY_PATH or in the system's cache."""
    name = f"libpython{PYTHON}.so.1.0"
    folders = [sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"]
    folders += [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folders += ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"]
    for folder in folders:
        if folder and (Path(folder) / name).is_file():
            return Path(folder) / name
    found = ctypes.util.find_library(f"python{PYTHON}")
    if found == name:  # known to the loader, in a folder of its own configuration: by name is enough
        return Path(name)
    raise InstallationError(
        f"{name} not found: the server's stub needs the shared library of Python {PYTHON}",
        f"install it (Debian, Ubuntu: apt-get install libpython{PYTHON}; pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared "
        f"pyenv install {PYTHON}; conda and uv bring it), or name its folder in LD_LIBRARY_PATH",
    )


def check_numpy() -> str:
    """The version of numpy; refuses 2.x, with which this stub loses the tensors a model returns without a word."""
    try:
        version = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        raise InstallationError("numpy is not installed", "pip install '.[runtime]' in the checkout") from None
    if int(version.split(".")[0]) >= 2:
        raise InstallationError(
            f"numpy {version} found, expected below 2: the stub of server 2.51.0 returns empty tensors with it",
            "pip install 'numpy<2'",
        )
    return version
