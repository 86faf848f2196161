"""Disks as they are: without locks or folder sync, read-only, with pipes and links, damaged, or gone meanwhile."""

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from rollout_help import altered, command_here, id_of, one_line
from trieton.bundle import Bundle, BundleError
from trieton_builder.rollout import Repository, RolloutError, prune, publish, versions
from trieton_builder.rollout import source as source_module
from trieton_builder.rollout.ledger import Ledger

SYNC, LOCK = (74, 75), (73,)  # fsync, fdatasync; flock: the numbers of x86-64


@pytest.fixture(scope="module")
def bundles(make_tiny_bundle):
    return [make_tiny_bundle(seed=seed) for seed in range(2)]


# The kernel itself refuses these calls of the process, as a filesystem without them does.
REFUSE = """
import ctypes, json, os, signal, struct, sys
refused = json.loads(sys.argv.pop(1))  # [[number of a system call, error], ...]
program = [(0x20, 0, 0, 0)]
for number, error in refused:
    program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error)]
program.append((0x06, 0, 0, 0x7FFF0000))
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(Program(len(program), ctypes.addressof(code))), 0, 0):
    sys.exit(77)
"""
PUBLISH = "from trieton_builder.__main__ import main\nmain()"
TAKE = """
from trieton_builder.rollout.errors import LockedError
from trieton_builder.rollout.repository import Repository
repository, notes = Repository(sys.argv[1]), []
def locked():
    child = os.fork()
    if child == 0:
        try:
            with repository.lock():
                os._exit(0)
        except LockedError as error:
            print(error, flush=True)
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
with repository.lock(note=notes.append):
    assert locked() == 3
assert len(notes) == 1, notes
child = os.fork()
if child == 0:
    with repository.lock():
        os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
assert (repository.state / "lock.held").exists()
with repository.lock():
    assert locked() == 3
assert not list(repository.state.glob("lock.held*"))
"""


def run_refused(refused: list[tuple[int, int]], script: str, *arguments: object) -> subprocess.CompletedProcess:
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of the system calls are those of x86-64")
    run = [sys.executable, "-c", REFUSE + script, json.dumps(refused), *map(str, arguments)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel takes no filter of system calls")
    return done


@pytest.mark.case("W34")
def test_without_locks_and_folder_sync_a_publish_works_and_says_so_once(tmp_path, bundles):
    root = tmp_path / "models"
    refused = [*((number, 22) for number in SYNC), *((number, 38) for number in LOCK)]
    done = run_refused(refused, PUBLISH, "publish", bundles[0], root, "--triton", "none", "--no-preflight")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("✓")]
    assert len(said) == 2
    assert f"{root}.rollout/lock.held stands for the lock" in said[0]
    assert "Function not implemented" in said[0]
    assert f"{root}.rollout: this filesystem cannot sync" in said[1]
    assert Bundle.open(Repository(root).path(1)).bundle_id == id_of(bundles[0])
    assert not (tmp_path / "models.rollout" / "lock.held").exists()


@pytest.mark.case("W34")
@pytest.mark.parametrize("error", [22, 37, 38, 95], ids=["EINVAL", "ENOLCK", "ENOSYS", "ENOTSUP"])
def test_without_locks_two_publishers_still_exclude_each_other_and_a_dead_one_is_passed_over(tmp_path, error):
    repository = Repository(tmp_path / "models")
    repository.prepare()
    done = run_refused([(number, error) for number in LOCK], TAKE, repository.root)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(f"is working on {repository.root}" in line and f"{repository.state}/lock.held" in line for line in lines)


@pytest.mark.case("W34")
def test_a_lock_file_of_another_machine_is_named_and_never_taken_away(tmp_path):
    repository = Repository(tmp_path / "models")
    repository.prepare()
    held = repository.state / "lock.held"
    held.write_text(json.dumps({"pid": 1, "started": 0, "host": "elsewhere", "namespace": "pid:[1]"}))
    script = TAKE.split("def locked")[0] + "\nwith repository.lock():\n    pass"
    done = run_refused([(number, 38) for number in LOCK], script, repository.root)
    assert f"process 1 on elsewhere is working on {repository.root}" in done.stderr
    assert f"remove {held}" in done.stderr
    assert held.exists()


@pytest.mark.case("W56")
@pytest.mark.parametrize("what", ["fifo", "socket", "link", "link to a folder", "bytecode"])
def test_opening_a_bundle_refuses_what_publishing_it_refuses_and_says_why(tmp_path, bundles, what, monkeypatch):
    odd = tmp_path / "odd"
    shutil.copytree(bundles[0], odd)
    place = odd / "retriever" / "more"
    if what == "fifo":
        os.mkfifo(place)
        reason = "a named pipe"
    elif what == "socket":
        monkeypatch.chdir(odd / "retriever")  # the path of a socket may not be long
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("more")
        monkeypatch.chdir(tmp_path)
        reason = "a socket"
    elif what == "bytecode":
        place = odd / "__pycache__"
        place.unlink()
        place.mkdir()
        (place / "model.cpython-311.pyc").write_bytes(b"x")
        reason = "a folder of bytecode"
    else:
        place.symlink_to(bundles[1] / "retriever" / ("decode.onnx" if what == "link" else ""))
        reason = "a link"
    with pytest.raises(BundleError, match=f"^{place}: {reason}"):
        Bundle.open(odd)
    for arguments in (
        ("publish", odd, tmp_path / "models", "--no-preflight"),
        ("publish", odd, tmp_path / "models", "--dry-run"),
        ("inspect", odd),
    ):
        assert f"{place}: {reason}" in one_line(command_here(*arguments)), arguments


@pytest.mark.case("W56")
def test_a_manifest_that_is_a_pipe_or_a_folder_is_refused_and_never_waited_for(tmp_path):
    for name, make in (("pipe", os.mkfifo), ("folder", os.mkdir)):
        (tmp_path / name).mkdir()
        make(tmp_path / name / "manifest.json")
        with pytest.raises(BundleError, match=rf"{name}/manifest\.json: a .*expected a plain file"):
            Bundle.open(tmp_path / name)
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match=r"file/manifest\.json: missing"):
        Bundle.open(tmp_path / "file")


@pytest.mark.case("W56")
def test_a_place_that_may_not_be_written_is_named_as_it_was_given(tmp_path, bundles):
    shut = tmp_path / "shut"
    shut.mkdir()
    # Root may write anywhere; without this capability even root may not.
    limit = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"] if os.geteuid() == 0 else []
    table = tmp_path / "sets.csv"
    table.write_text("item_id,even,third,rare,none_at_all\n1000,1,1,1,0\n")
    shut.chmod(0o555)
    try:
        for arguments, named in (
            (("publish", bundles[0], shut / "models", "--triton", "none"), f"model repository {shut}/models: "),
            (("refresh", bundles[0], "--sets", table, "--out", shut / "new"), f"{shut}/new: "),
        ):
            run = [*limit, sys.executable, "-m", "trieton_builder", *map(str, arguments)]
            done = subprocess.run(run, capture_output=True, text=True, check=False)
            said = one_line(done)
            assert named in said
            assert "Permission denied" in said
            assert "partial" not in said
    finally:
        shut.chmod(0o755)
    assert list(shut.iterdir()) == []


def test_a_bundle_that_vanishes_while_it_is_copied_is_named_and_leaves_nothing(tmp_path, bundles, monkeypatch):
    gone, root = tmp_path / "gone", tmp_path / "models"
    shutil.copytree(bundles[0], gone)
    copy = source_module.Source._copy

    def copy_and_vanish(self, name, place):
        copy(self, name, place)
        shutil.rmtree(gone, ignore_errors=True)

    monkeypatch.setattr(source_module.Source, "_copy", copy_and_vanish)
    said = one_line(command_here("publish", gone, root, "--triton", "none", "--no-preflight"))
    assert said.startswith(f"trieton: {gone}/")
    assert "removed meanwhile" in said
    assert not root.exists()
    assert list((tmp_path / "models.rollout" / "staging").iterdir()) == []


def test_a_bundle_that_is_changed_while_it_is_copied_is_refused(tmp_path, bundles, monkeypatch):
    changing, other = tmp_path / "changing", altered(bundles[0], tmp_path / "other", fields={"provenance": {"n": 1}})
    shutil.copytree(bundles[0], changing)
    copy = source_module.Source._copy

    def change_and_copy(self, name, place):
        shutil.copy(other / "manifest.json", changing / "manifest.json")
        copy(self, name, place)

    monkeypatch.setattr(source_module.Source, "_copy", change_and_copy)
    with pytest.raises(RolloutError, match=f"^{changing}: the bundle was changed while it was copied"):
        publish(changing, tmp_path / "models", servers=[], preflight=False)


@pytest.mark.parametrize("line", ["5", "[]", "{}", '{"action": "publish", "version": "7", "time": "x"}', "\0\0\0"])
def test_a_damaged_line_of_the_ledger_is_named_and_no_number_is_given_out(tmp_path, bundles, line):
    root = tmp_path / "models"
    publish(bundles[0], root, servers=[], preflight=False)
    path = Ledger(Repository(root).state).path
    path.write_text(f"{path.read_text()}{line}\n")
    number = len(path.read_text().splitlines())
    for arguments in (("publish", bundles[1], root, "--no-preflight"), ("versions", root)):
        assert f"{path}, line {number}: " in one_line(command_here(*arguments))
    assert Repository(root).versions() == [1]


def test_a_ledger_that_was_lost_gives_out_no_number_twice_and_strays_among_the_withdrawn_are_passed_over(
    tmp_path, bundles
):
    root = tmp_path / "models"
    for bundle in bundles:
        publish(bundle, root, servers=[], preflight=False)
    repository = Repository(root)
    repository.take_out(2)
    Ledger(repository.state).path.unlink()
    for stray in ("notes", "2.old", "²"):
        (repository.withdrawn / stray).mkdir()
    (repository.withdrawn / "7").write_text("a file is no version")
    assert [row["version"] for row in versions(root, servers=[])] == [2, 1]
    assert publish(bundles[1], root, servers=[], preflight=False).version == 3
    assert prune(root, keep=1, servers=[]) == [1]
    assert repository.withdrawn_versions() == [2]
    assert (repository.withdrawn / "notes").is_dir()


def test_a_version_whose_manifest_was_damaged_hinders_neither_the_table_nor_the_next_publish(tmp_path, bundles):
    root = tmp_path / "models"
    publish(bundles[0], root, servers=[], preflight=False)
    (Repository(root).path(1) / "manifest.json").write_text("{")
    assert command_here("versions", root).returncode == 0
    seen = []
    assert publish(bundles[1], root, servers=[], preflight=False, listener=seen.append, keep=1).removed == [1]
    assert any("named sets are not compared" in event.text for event in seen)


def test_a_rollback_that_was_killed_is_finished_and_named_by_the_next_command(tmp_path, bundles):
    root = tmp_path / "models"
    for bundle in bundles:
        publish(bundle, root, servers=[], preflight=False)
    child = os.fork()
    if child == 0:
        from trieton_builder.rollout import rollback

        def kill(event):
            if event.step == "rename":
                os.kill(os.getpid(), signal.SIGKILL)

        rollback(root, servers=[], listener=kill)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    done = command_here("publish", bundles[1], root, "--triton", "none", "--no-preflight")
    assert "version 2 is withdrawn, left by a killed publisher" in done.stdout
    assert Repository(root).versions() == [1, 3]
