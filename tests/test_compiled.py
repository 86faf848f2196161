"""Compiled code is kept where this user may write, and nowhere that another user could have written."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from trieton import compiled
from trieton_builder.indexing.trie import build_index

NOBODY = 65534
ROOT = Path(__file__).parents[1]
BECOME_NOBODY = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups",
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip
as_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root becomes another user, by util-linux's setpriv"
)
PACKAGES = ("python_backend/trieton", "builder/trieton_builder", "clients/trieton_client")


@pytest.fixture
def shared():
    """A folder that every user may enter; pytest's own are for their maker alone."""
    with tempfile.TemporaryDirectory(prefix="nobody-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def installed(shared: Path) -> Path:
    """The packages as somebody else installed them: root's, without compiled code, closed to others' writing."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, shared / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    return shared


def as_nobody(installed: Path, temporary: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Run Python as a user without a home, who may write nothing here and read all: Python may lie in a closed home."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG"))}
    environment |= {"HOME": "/nonexistent", "TMPDIR": str(temporary), "PYTHONPATH": str(installed)}
    run = [sys.executable, *map(str, command)]
    return subprocess.run([*BECOME_NOBODY, *run], env=environment, cwd="/", capture_output=True, text=True, check=False)


@as_root
@pytest.mark.case("W35")
def test_a_user_without_a_home_inspects_with_packages_that_are_not_his(installed: Path, shared: Path):
    temporary = shared / "tmp"
    temporary.mkdir()
    os.chown(temporary, NOBODY, NOBODY)
    build_index(np.array([[0, 1], [1, 0], [1, 1]]), codebook_sizes=(2, 2)).save(shared / "items.index")
    inspect = ("-m", "trieton_builder", "inspect", shared / "items.index", "--json")
    done = as_nobody(installed, temporary, *inspect)
    assert (done.returncode, done.stderr) == (0, "")
    private = temporary / f"trieton-numba-{NOBODY}"
    found = private.stat()
    assert (found.st_uid, found.st_mode & 0o777) == (NOBODY, 0o700)
    assert list(private.rglob("*.nbi")), "what was compiled is kept"
    # Somebody may have put code there: it is compiled anew, and said once, however many functions there are.
    private.chmod(0o777)
    again = as_nobody(installed, temporary, *inspect)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    (warning,) = again.stderr.splitlines()
    assert str(private) in warning


@pytest.mark.case("W35")
@pytest.mark.parametrize("how", ["another user's", "open to others", "a link", "a file"])
def test_a_folder_that_somebody_else_could_have_filled_is_not_used(tmp_path: Path, monkeypatch, how: str):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = compiled.private_folder()
    assert folder.parent == tmp_path
    assert compiled.private_folder() == folder
    if how == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root gives a folder away")
        os.chown(folder, NOBODY, NOBODY)
    elif how == "open to others":
        folder.chmod(0o750)
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere") if how == "a link" else folder.write_text("")
    with pytest.raises(OSError, match=str(folder)):
        compiled.private_folder()


def test_every_kernel_asks_for_its_cache_here():
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path != Path(compiled.__file__):
                assert "cache=True" not in path.read_text(), f"{path}: use trieton.compiled.cached_njit"
