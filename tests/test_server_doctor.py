"""`trieton doctor` and the start of the server name what a machine lacks, and what to do about it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cgroup import limit_cpu, limit_memory, real_group, run_in
from trieton_builder.server import installation
from trieton_builder.server.doctor import examine
from trieton_builder.server.installation import InstallationError, find_installation
from trieton_builder.server.process import TritonServer
from typer.testing import CliRunner


def statuses(**options):
    return {finding.check: finding for finding in examine(start=False, **options)}


def test_a_machine_that_runs_these_tests_passes():
    findings = statuses()
    assert not [finding for finding in findings.values() if finding.status == "fail"]
    assert {
        "Python",
        "server wheel",
        "stub",
        "libpython",
        "numpy",
        "shared memory",
        "ports",
        "disk",
        "cores",
        "memory",
        "compiled code",
    } <= set(findings)


SEE = """
import json, duckdb, polars
from trieton.resources import usable_cores
from trieton_builder.server import doctor
pools = [polars.thread_pool_size(), duckdb.execute("select current_setting('threads')").fetchone()[0], usable_cores()]
print(json.dumps([pools, doctor._cores().to_json(), doctor._memory().to_json()]))
"""


@pytest.mark.case("W27")
def test_half_a_core_and_a_memory_limit_are_shown_and_every_pool_of_threads_of_a_build_keeps_to_them():
    with real_group("cpu") as cpu, real_group("memory") as memory:
        limit_cpu(cpu, 0.5)
        limit_memory(memory, 700 << 20)
        done = run_in([cpu, memory], sys.executable, "-c", SEE, check=True)
    pools, cores, memory = json.loads(done.stdout)
    assert pools == [1, 1, 1]
    assert cores["text"].startswith("1 usable of ")
    assert "quota of the control group: 0.5" in cores["text"]
    assert (cores["status"], memory["status"]) == ("note", "note")
    assert "limit of the control group: 700 MiB" in memory["text"]
    assert " of 700 MiB available" in memory["text"]


def test_every_finding_that_is_not_ok_says_what_to_do(monkeypatch):
    monkeypatch.setattr(installation, "PYTHON", "3.99")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    findings = statuses()
    assert findings["stub"].status == findings["libpython"].status == "fail"
    assert findings["libpython"].text.endswith("needs the shared library of Python 3.99")
    assert findings["libpython"].remedy.startswith("install it (Debian, Ubuntu: apt-get install libpython3.99; pyenv: ")
    assert findings["libpython"].remedy.endswith("in LD_LIBRARY_PATH")
    assert findings["Java"].status == findings["GPU"].status == "note"
    assert all(finding.remedy for finding in findings.values() if finding.status != "ok")


def test_a_missing_libpython_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(installation, "PYTHON", "3.99")
    with pytest.raises(InstallationError, match=r"libpython3\.99\.so\.1\.0 not found.*apt-get install libpython3\.99"):
        installation.find_libpython()


def test_numpy_2_is_refused(monkeypatch):
    monkeypatch.setattr(installation.importlib.metadata, "version", lambda name: "2.1.0")
    with pytest.raises(InstallationError, match=r"numpy 2\.1\.0 found, expected below 2"):
        installation.check_numpy()
    finding = statuses()["numpy"]
    assert (finding.status, finding.remedy) == ("fail", "pip install 'numpy<2'")


@pytest.fixture
def wheel_copy(tmp_path, monkeypatch):
    """A copy of the wheel's record and server (links to the large libraries) that a test may damage."""
    site = Path(find_installation().binary).parents[3]
    info = next(site.glob("nvidia_pytriton-*.dist-info"))
    shutil.copytree(info, tmp_path / info.name)
    shutil.copytree(site / "pytriton" / "tritonserver", tmp_path / "pytriton" / "tritonserver")
    (tmp_path / "pytriton" / "__init__.py").touch()
    (tmp_path / "nvidia_pytriton.libs").symlink_to(site / "nvidia_pytriton.libs")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pytriton", raising=False)
    return tmp_path / "pytriton" / "tritonserver"


def test_a_wheel_that_was_cut_short_is_refused_before_anything_starts(wheel_copy, tmp_path):
    binary = wheel_copy / "bin" / "tritonserver"
    binary.write_bytes(binary.read_bytes()[:-1000])
    with pytest.raises(
        InstallationError, match=r"damaged wheel: .*tritonserver has .* bytes, expected .*; pip install"
    ):
        TritonServer(tmp_path, load=()).start()


def test_a_wheel_with_a_missing_library_is_refused(wheel_copy):
    (wheel_copy / "backends" / "python" / "libtriton_python.so").unlink()
    with pytest.raises(InstallationError, match=r"damaged wheel: .*libtriton_python.so is missing; pip install"):
        find_installation()


def test_the_doctor_sees_a_changed_byte(wheel_copy):
    backend = wheel_copy / "backends" / "python" / "triton_python_backend_utils.py"
    backend.write_bytes(backend.read_bytes()[:-1] + b"#")
    finding = statuses()["server wheel"]
    assert finding.status == "fail"
    assert "is not what the wheel brought" in finding.text
    assert finding.remedy.startswith("pip install --force-reinstall")


@pytest.mark.server
def test_the_command_prints_json_and_its_exit_code_tells():
    from trieton_builder.cli import app

    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    assert {"check": "server", "status": "ok"}.items() <= json.loads(done.stdout)[-1].items()


def test_a_wrong_folder_is_one_clear_line():
    done = subprocess.run(
        [sys.executable, "-m", "trieton_builder", "doctor", "/nowhere"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "trieton: /nowhere: no such folder\n")
