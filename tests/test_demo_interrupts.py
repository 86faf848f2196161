"""The demo beside another one, and interrupted: nothing of the first is touched, nothing of the second is left."""

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

# The demo on a bundle that is there already, and waiting where it would show people.
SHORT = """
import functools, sys
from pathlib import Path
from trieton_builder.__main__ import main
from trieton_builder.demo import run
bundle = Path(sys.argv.pop(1))
run.prepare = lambda *_: run.Prepared(None, None, (bundle, bundle))
run.publish = functools.partial(run.publish, preflight=False)
run._show_people = lambda prepared, server, console: (print(server.http_url, flush=True), sys.stdin.readline())
run._swap = run._evaluate = lambda *_: None
main()
"""


def start(tmp_path: Path, *command: object) -> subprocess.Popen[str]:
    (tmp_path / "temporary").mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    run = [sys.executable, *map(str, command), "demo", "--workdir", str(tmp_path / "demo")]
    pipe = subprocess.PIPE
    return subprocess.Popen(run, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def until(holds: Callable[[], object], process: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def nothing_is_left(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    # A folder of numba's own stays, on purpose, where the packages may not be written.
    assert [path.name for path in (tmp_path / "temporary").iterdir() if "numba" not in path.name] == []
    assert list(Path("/dev/shm").glob(f"trieton-{process.pid}-*")) == []
    commands = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    assert [line for line in commands if any(str(tmp_path) in word for word in line)] == []


@pytest.mark.server
@pytest.mark.case("W51")
@pytest.mark.parametrize(
    ("number", "twice", "code"), [(signal.SIGINT, False, 130), (signal.SIGTERM, True, 143)], ids=["once", "twice"]
)
def test_an_interrupt_while_the_demo_stops_its_server_ends_both_at_once(tiny_bundle, tmp_path, number, twice, code):
    with start(tmp_path, "-c", SHORT, tiny_bundle) as process:
        lines = iter(process.stdout.readline, "")
        url = next(line for line in lines if line.startswith("127.0.0.1:")).strip()
        held = http.client.HTTPConnection(url)
        held.request("GET", "/v2")  # the server waits for an idle connection until its exit timeout
        held.getresponse().read()
        if twice:
            process.send_signal(number)
        else:
            process.stdin.write("\n")
            process.stdin.flush()
        until(lambda: "Waiting for in-flight" in (tmp_path / "demo" / "server.log").read_text(), process)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        held.close()
    assert process.returncode == code, said
    assert said.splitlines()[-1] == "trieton: interrupted"
    assert "Traceback" not in said
    nothing_is_left(tmp_path, process)


@pytest.mark.case("W49")
@pytest.mark.case("W51")
def test_a_second_demo_in_one_folder_is_told_and_ctrl_c_in_the_export_leaves_nothing(tmp_path):
    folder = tmp_path / "demo"
    with start(tmp_path, "-m", "trieton_builder") as first:
        until(lambda: (folder / ".lock").exists() and (folder / ".lock").read_text(), first)
        with start(tmp_path, "-m", "trieton_builder") as second:
            _, said = second.communicate()
        assert second.returncode == 1
        (line,) = said.splitlines()
        assert f"process {first.pid}" in line
        assert "--workdir" in line
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(timeout=60)
    assert (first.returncode, said.splitlines()[-1]) == (130, "trieton: interrupted")
    nothing_is_left(tmp_path, first)
    assert [path.name for path in folder.iterdir()] == [".lock"]
