"""The real server: it starts, answers, is guarded, stops cleanly, and says what is wrong when it cannot."""

import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from trieton_builder.server.leftovers import SHM
from trieton_builder.server.process import (
    GRPC_KEY_HEADER,
    KEY_HEADER,
    PortTakenError,
    ServerError,
    TritonServer,
    choose_ports,
    leftovers,
)
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.server

CONFIG = """
backend: "python"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_INT32 dims: [-1] }]
output [{ name: "y" data_type: TYPE_INT32 dims: [-1] }, { name: "imports" data_type: TYPE_STRING dims: [1] }]
instance_group [{ kind: KIND_CPU }]
"""
MODEL = """
import sys
import numpy as np
import trieton
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            about = f"{sys.version_info[0]}.{sys.version_info[1]} {sys.prefix} {np.__version__} {trieton.__file__}"
            answers.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("y", x * 2),
                pb_utils.Tensor("imports", np.array([[about.encode()]] * len(x), dtype=object)),
            ]))
        return answers
"""


def make_repository(folder: Path, model: str = MODEL) -> Path:
    version = folder / "double" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.py").write_text(model)
    return folder


def ask(client, module, numbers=(1, 2, 3)):
    x = module.InferInput("x", [1, len(numbers)], "INT32")
    x.set_data_from_numpy(np.array([numbers], np.int32))
    return client.infer("double", [x])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with TritonServer(make_repository(tmp_path_factory.mktemp("repository")), load=("double",)) as server:
        yield server


def test_a_model_answers_over_grpc_and_http(server):
    with grpc.InferenceServerClient(server.grpc_url) as client:
        assert ask(client, grpc).as_numpy("y").tolist() == [[2, 4, 6]]
    with http.InferenceServerClient(server.http_url) as client:
        assert ask(client, http).as_numpy("y").tolist() == [[2, 4, 6]]


def test_the_model_runs_in_this_environment_with_this_package(server):
    import trieton

    with grpc.InferenceServerClient(server.grpc_url) as client:
        about = ask(client, grpc).as_numpy("imports")[0, 0].decode().split()
    assert about == [f"{sys.version_info[0]}.{sys.version_info[1]}", sys.prefix, np.__version__, trieton.__file__]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("nonsense", "expected --name=value, got 'nonsense'"),
        ("--log-verbose", "expected --name=value, got '--log-verbose'"),
        ("--http-port=1", "--http-port is set here already"),
        ("--model-repository=/", "--model-repository is set here already"),
    ],
)
def test_further_options_that_are_none_or_undo_ours_are_refused_before_the_start(tmp_path, option, text):
    with pytest.raises(ValueError, match=text):
        TritonServer(tmp_path, extra_args=[option])


@pytest.mark.parametrize(
    ("option", "text"), [("--nonsense=1", "--nonsense=1"), ("--grpc-keepalive-time=soon", "Got soon")]
)
def test_an_option_that_the_server_refuses_is_named(tmp_path, option, text):
    with pytest.raises(ServerError, match=f"refuses an option: .*{text}"):
        TritonServer(make_repository(tmp_path), load=("double",), extra_args=[option]).start()


def test_it_serves_on_ipv6_and_says_which_address_it_has_not(tmp_path):
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with TritonServer(make_repository(tmp_path), load=("double",), address="::1") as server:
        assert server.grpc_url.startswith("[::1]:")
        with grpc.InferenceServerClient(server.grpc_url) as client:
            assert ask(client, grpc).as_numpy("y").tolist() == [[2, 4, 6]]
        with urllib.request.urlopen(server.metrics_url) as answer:
            assert b"nv_inference_request_summary_us" in answer.read()
    for wrong in ("203.0.113.9", "no such host"):
        with pytest.raises(ServerError, match=f"address '{wrong}'"):
            TritonServer(tmp_path, load=("double",), address=wrong).start()


def test_control_endpoints_need_the_key_and_inference_does_not(server):
    with grpc.InferenceServerClient(server.grpc_url) as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.load_model("double")
        with pytest.raises(InferenceServerException, match="restricted"):
            client.load_model("double", headers={GRPC_KEY_HEADER: "wrong"})
        client.load_model("double", headers={GRPC_KEY_HEADER: server.control_key})
    with http.InferenceServerClient(server.http_url) as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.unload_model("double")
        index = client.get_model_repository_index(headers={KEY_HEADER: server.control_key})
    assert [(model["name"], model["state"]) for model in index] == [("double", "READY")]


def test_two_servers_side_by_side_share_nothing_and_leave_nothing(server, tmp_path):
    second = TritonServer(make_repository(tmp_path / "other"), load=("double",)).start()
    folder, children = second.log_path.parent, second.processes()
    assert {second.http_url, second.grpc_url}.isdisjoint({server.http_url, server.grpc_url})
    assert list(SHM.glob(f"{second.shm_prefix}*"))
    assert second.stop() == 0
    assert not list(SHM.glob(f"{second.shm_prefix}*"))
    assert not folder.exists()
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    with grpc.InferenceServerClient(server.grpc_url) as client:
        assert ask(client, grpc).as_numpy("y").tolist() == [[2, 4, 6]]


def test_a_starter_that_is_killed_takes_its_server_along(tmp_path):
    program = (
        "import sys, time; from trieton_builder.server.process import TritonServer\n"
        f"server = TritonServer({str(make_repository(tmp_path))!r}, load=('double',)).start()\n"
        "print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as starter:
        child = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
        folder = next(Path(tempfile.gettempdir()).glob(f"trieton-{starter.pid}-*"))
    child.wait(timeout=60)
    assert folder in leftovers.dead_folders()
    leftovers.sweep()
    assert not folder.exists()
    assert not list(SHM.glob(f"trieton-{starter.pid}-*"))


def test_the_stub_of_a_starter_killed_while_it_loads_is_swept_once_its_server_has_gone(tmp_path):
    folder = make_repository(
        tmp_path / "models", f"import time\nopen({str(tmp_path / 'loading')!r}, 'w')\ntime.sleep(600)"
    )
    program = (
        "from trieton_builder.server.process import TritonServer\n"
        f"TritonServer({str(folder)!r}, load=('double',)).start()"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as starter:
        deadline = time.monotonic() + 120
        while not (tmp_path / "loading").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (server,) = psutil.Process(starter.pid).children()
        (stub,) = server.children()
        starter.kill()
    psutil.wait_procs([server], timeout=60)
    leftovers.sweep()
    _, alive = psutil.wait_procs([server, stub], timeout=30)
    assert not alive
    assert not list(Path(tempfile.gettempdir()).glob(f"trieton-{starter.pid}-*"))
    assert not list(SHM.glob(f"trieton-{starter.pid}-*"))


def test_a_server_that_crashes_leaves_no_stub_once_it_is_stopped(tmp_path):
    server = TritonServer(make_repository(tmp_path), load=("double",)).start()
    crashed, stub = server.processes()
    stub.suspend()  # a busy one: left to itself it would notice and end
    crashed.kill()
    crashed.wait(timeout=60)
    server.stop()
    assert not psutil.wait_procs([stub], timeout=30)[1]
    assert not list(SHM.glob(f"{server.shm_prefix}*"))


def test_a_path_with_spaces_is_served_like_any_other(tmp_path, monkeypatch):
    (tmp_path / "of the machine").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "of the machine"))
    repository = make_repository(tmp_path / "my models")
    with TritonServer(repository, load=("double",)) as server, grpc.InferenceServerClient(server.grpc_url) as client:
        assert ask(client, grpc).as_numpy("y").tolist() == [[2, 4, 6]]


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"gRPC port {port} on 127.0.0.1: Address already in use"):
            TritonServer(make_repository(tmp_path), load=("double",), ports=(None, port, None)).start()


def test_one_port_for_two_endpoints_is_refused():
    with pytest.raises(ValueError, match="metrics port: expected another one than the HTTP port, got 8000 for both"):
        choose_ports((8000, 8001, 8000))
    with pytest.raises(ValueError, match="gRPC port: expected 0 to 65535, got 65536"):
        choose_ports((None, 65536, None))
    assert len(set(choose_ports((0, 0, None)))) == 3


def test_a_port_lost_between_choosing_and_binding_is_chosen_anew(tmp_path, monkeypatch):
    import trieton_builder.server.process as module

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        answers = [(other.getsockname()[1], *choose_ports((None, None, None))[1:]), choose_ports((None, None, None))]
        monkeypatch.setattr(module, "choose_ports", lambda *_: answers.pop(0))
        server = TritonServer(make_repository(tmp_path), load=()).start()
        try:
            assert answers == []
            assert server.poll() is None
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda folder: folder / "nowhere", "nowhere: no such folder"),
        (lambda folder: folder, "has no model 'double' .there: nothing."),
        (lambda folder: (folder / "double").mkdir() or folder, "has no config.pbtxt"),
        (lambda folder: _without(folder, "double/1/model.py", "double/1"), "has no version yet"),
        (lambda folder: _without(folder, "double/1/model.py"), "has no model.py; the server would hang"),
        (
            lambda folder: make_repository(folder, "import nothing_of_that_name"),
            r"version 1 does not start: ModuleNotFoundError: No module named 'nothing_of_that_name'$",
        ),
    ],
)
def test_a_wrong_repository_is_refused_in_words(tmp_path, prepare, text):
    with pytest.raises(ServerError, match=text):  # not that it was not ready in time, which says that it hangs
        TritonServer(prepare(tmp_path), load=("double",)).start()


def _without(folder: Path, *paths: str) -> Path:
    make_repository(folder)
    for path in paths:
        target = folder / path
        target.rmdir() if target.is_dir() else target.unlink()
    return folder
