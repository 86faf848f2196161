"""Several servers and repositories, object stores, POLL mode, recorded canaries, and the commands themselves."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest
from rollout_help import altered, command, command_here, id_of, one_line, small_repository
from rollout_traffic import HISTORIES
from trieton_builder.rollout import Endpoint, Repository, RolloutError, publish, rollback, versions
from trieton_builder.rollout import canary as canaries
from trieton_builder.rollout.ledger import Ledger
from trieton_builder.server.process import TritonServer
from trieton_client import Client


@pytest.fixture(scope="module")
def bundles(make_tiny_bundle):
    return [make_tiny_bundle(seed=seed) for seed in (0, 1)]


def answering(server: TritonServer) -> str:
    with Client(server.grpc_url, retries=0) as client:
        return client.retrieve(HISTORIES[0]).bundle_id


class Trio:
    """Servers a and b on one repository, server c on another."""

    def __init__(self, folder: Path, bundle: Path):
        self.first, self.second = small_repository(folder / "first"), small_repository(folder / "second")
        for root in (self.first, self.second):
            publish(bundle, root, servers=[], preflight=False)
        self.servers = [TritonServer(root).start() for root in (self.first, self.first, self.second)]
        self.endpoints = [
            Endpoint(server.grpc_url, server.control_key, repository=server.repository) for server in self.servers
        ]


@pytest.fixture(scope="module")
def trio(tmp_path_factory, bundles):
    trio = Trio(tmp_path_factory.mktemp("trio"), bundles[0])
    yield trio
    for server in trio.servers:
        server.kill()


@pytest.mark.server
def test_the_first_server_that_fails_takes_those_before_it_back(trio, bundles, tmp_path):
    picky = altered(
        bundles[1],
        tmp_path / "picky",
        model_dot_py=(
            "from trieton.serving import TritonPythonModel as Model\n"
            "class TritonPythonModel(Model):\n"
            "    def initialize(self, args):\n"
            "        if 'second' in args['model_repository']:\n"
            "            raise RuntimeError('not on this machine')\n"
            "        super().initialize(args)\n"
        ),
    )
    seen = []
    with pytest.raises(RolloutError, match="not on this machine"):
        publish(picky, trio.first, servers=trio.endpoints, preflight=False, listener=seen.append)
    reached = [event.text.split()[0] for event in seen if (event.step, event.state) == ("canary", "end")]
    assert reached == [server.grpc_url for server in trio.servers[:2]]
    assert [answering(server) for server in trio.servers] == [id_of(bundles[0])] * 3
    assert Repository(trio.first).versions() == Repository(trio.second).versions() == [1]


@pytest.mark.server
def test_several_servers_change_in_turn_and_go_back_together(trio, bundles):
    done = publish(bundles[1], trio.first, servers=trio.endpoints, preflight=False)
    assert done.servers == [server.grpc_url for server in trio.servers]
    assert [answering(server) for server in trio.servers] == [id_of(bundles[1])] * 3
    back = rollback(trio.first, servers=trio.endpoints)
    assert (back["from"], back["to"], back["servers"]) == (done.version, 1, done.servers)
    assert [answering(server) for server in trio.servers] == [id_of(bundles[0])] * 3
    assert Repository(trio.first).versions() == Repository(trio.second).versions() == [1]


@pytest.mark.server
def test_recorded_canaries_hold_a_new_version_to_what_the_old_one_answered(trio, bundles, tmp_path):
    server = trio.servers[2]
    recorded = canaries.record(server.grpc_url, HISTORIES, min_overlap=0.9)
    canaries.save_canaries(Repository(trio.second).canary_file, recorded)
    assert canaries.load_canaries(Repository(trio.second).canary_file) == recorded
    assert all(one.min_results == len(one.items) > 0 for one in recorded)
    with pytest.raises(canaries.CanaryError, match=r"shares \d+% of the items of the version before, expected 90%"):
        publish(bundles[1], trio.second, servers=trio.endpoints[2:], preflight=False)
    assert answering(server) == id_of(bundles[0])
    # The same content under a new number gives the same items.
    again = publish(bundles[0], trio.second, servers=trio.endpoints[2:], preflight=False)
    assert again.outcome == "serving"


@pytest.mark.server
def test_poll_mode_takes_published_versions_and_rollbacks_by_itself(tmp_path, bundles):
    root = small_repository(tmp_path / "models")
    publish(bundles[0], root, servers=[], preflight=False)
    with TritonServer(root, model_control="poll") as server:
        deadline = time.monotonic() + 30
        while True:  # in this mode the server is up before its models are
            try:
                assert answering(server) == id_of(bundles[0])
                break
            except ConnectionError:
                assert time.monotonic() < deadline
        servers = [Endpoint(server.grpc_url, server.control_key)]
        assert publish(bundles[1], root, servers=servers, preflight=False).outcome == "serving"
        assert answering(server) == id_of(bundles[1])
        assert rollback(root, servers=servers)["to"] == 1
        assert answering(server) == id_of(bundles[0])


@pytest.mark.parametrize("scheme", ["memory", "zip"])
def test_a_bundle_comes_from_an_object_store_by_way_of_the_local_disk(tmp_path, bundles, scheme):
    if scheme == "memory":
        address = "memory://store/bundle"
        fsspec.filesystem("memory").put(str(bundles[0]), "/store/bundle", recursive=True)
        # The store lives in this process only.
        done = publish(address, tmp_path / "models", servers=[], preflight=False)
        repository = Repository(tmp_path / "models")
        assert (done.version, done.bundle_id) == (1, id_of(bundles[0]))
        assert repository.bundle_id(1) == id_of(bundles[0])
    else:
        archive = shutil.make_archive(str(tmp_path / "bundle"), "zip", bundles[0])
        done = command_here("publish", f"zip://::file://{archive}", tmp_path / "models", "--no-preflight", "--json")
        assert json.loads(done.stdout)["bundle_id"] == id_of(bundles[0]), done.stderr


def test_a_damaged_byte_is_refused_and_leaves_nothing(tmp_path, bundles):
    damaged = tmp_path / "damaged"
    shutil.copytree(bundles[0], damaged)
    file = damaged / "index.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    for dry in ([], ["--dry-run"]):
        done = command_here("publish", damaged, tmp_path / "models", *dry)
        assert one_line(done).startswith(f"trieton: {damaged}/index.safetensors: checksum differs from the manifest")
        assert not (tmp_path / "models").exists()
    (row,) = versions(tmp_path / "models")
    assert (row["state"], row["error"]) == ("failed", one_line(done).removeprefix("trieton: "))
    assert list((tmp_path / "models.rollout" / "staging").iterdir()) == []
    (tmp_path / "models").mkdir()  # somebody's own folder stays
    command_here("publish", damaged, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_dry_run_changes_nothing(tmp_path, bundles):
    done = command_here("publish", bundles[0], tmp_path / "models", "--dry-run")
    assert done.stdout == f"would publish bundle {id_of(bundles[0])} as version 1; nothing was changed\n"
    assert list(tmp_path.iterdir()) == []


def test_every_wrong_input_is_one_line_and_exit_code_1(tmp_path, bundles):
    root = tmp_path / "models"
    publish(bundles[0], root, servers=[], preflight=False)
    (tmp_path / "empty").mkdir()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        cases = [
            (("publish", tmp_path / "empty", root), "no manifest.json there; expected a bundle"),
            (("publish", bundles[0], root, "--triton", "localhost"), "expected HOST:PORT"),
            (("publish", bundles[0], root, "--triton", f"localhost:{port + 1}"), "no server answers there"),
            (("publish", bundles[0], tmp_path / "no" / "models"), "no such folder"),
            (("rollback", root), "version 1 is the only one"),
            (("rollback", root, "--to", "7"), "version 7 is not in"),
            (("withdraw", root, "7"), "version 7 is not in"),
            (("versions", tmp_path / "nowhere"), "no such folder"),
            (("prune", tmp_path / "nowhere"), "no such folder"),
            (("serve", tmp_path / "nowhere"), "no such folder"),
            (("serve", root, "--http-port", port), f"HTTP port {port} on 127.0.0.1: Address already in use"),
            (("canary", "record", root), "no server: name one with --triton"),
        ]
        for arguments, text in cases:
            assert text in one_line(command_here(*arguments)), arguments


def test_a_folder_the_server_would_misread_is_named(tmp_path, bundles):
    publish(bundles[0], tmp_path / "models", servers=[], preflight=False)
    (tmp_path / "models" / "generative_retriever" / "4.tmp").mkdir()
    with pytest.raises(RolloutError, match=r"4\.tmp: the server takes this for a version"):
        publish(bundles[1], tmp_path / "models", servers=[], preflight=False)


def test_a_ledger_line_cut_short_by_a_crash_is_dropped_and_the_number_before_counts(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add("publish", 7, outcome="started")
    with open(ledger.path, "a") as file:
        file.write('{"action": "publ')
    assert ledger.highest() == 7
    ledger.add("publish", 8, outcome="started")
    assert [entry["version"] for entry in ledger.entries()] == [7, 8]


def test_going_back_without_a_server_changes_what_one_will_load(tmp_path, bundles):
    root = tmp_path / "models"
    for bundle in (bundles[0], bundles[1], bundles[0]):
        publish(bundle, root, servers=[], preflight=False)
    back = rollback(root, to=1, servers=[])
    assert (back["from"], back["to"]) == (3, 1)
    assert Repository(root).versions() == [1]
    assert publish(bundles[1], root, servers=[], preflight=False).version == 4
    assert {row["version"]: row["state"] for row in versions(root, servers=[])} == {
        4: "current",
        3: "withdrawn",
        2: "withdrawn",
        1: "kept",
    }


@pytest.mark.server
def test_the_commands_from_serve_to_rollback(tmp_path, bundles):
    root = small_repository(tmp_path / "models")
    assert command_here("publish", bundles[0], root, "--no-preflight").returncode == 0
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--exit-timeout", "5"]
    arguments = [sys.executable, "-m", "trieton_builder", "serve", str(root), *ports, "--json"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as serving:
        lines = []
        while not lines or lines[-1] != "}\n":
            lines.append(serving.stdout.readline())
        addresses = json.loads("".join(lines))
        assert os.stat(tmp_path / "models.rollout" / "control.key").st_mode & 0o777 == 0o600
        # No address and no key given: publish finds the server that runs here.
        done = command("publish", bundles[1], root, "--no-preflight", "--json")
        assert json.loads(done.stdout)["servers"] == [addresses["grpc"]], done.stderr
        wrong = command("publish", bundles[1], root, "--triton", addresses["grpc"], TRIETON_CONTROL_KEY="wrong")
        assert "needs the control key" in one_line(wrong)
        done = command("rollback", root)
        assert f"version 2 is withdrawn, version 1 (bundle {id_of(bundles[0])}) answers" in done.stdout, done.stderr
        rows = json.loads(command_here("versions", root, "--json").stdout)
        assert [(row["version"], row["state"]) for row in rows] == [(2, "withdrawn"), (1, "serving")]
        assert json.loads(command_here("prune", root, "--keep", "1", "--json").stdout) == {
            "removed": [],
            "dry_run": False,
        }
        taken = addresses["http"].rpartition(":")[2]  # a second server that cannot start leaves the first one its note
        second = command_here("serve", root, *ports[2:], "--http-port", taken)
        assert second.returncode == 1
        assert f"is also served on {addresses['grpc']}" in second.stderr
        assert "Address already in use" in second.stderr.splitlines()[-1]
        (noted,) = (tmp_path / "models.rollout" / "servers").iterdir()
        assert json.loads(noted.read_text())["pid"] == addresses["pid"]
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(timeout=30) == 0
    assert list((tmp_path / "models.rollout" / "servers").iterdir()) == []


@pytest.mark.server
@pytest.mark.parametrize("key", ["", "there"])
def test_a_repository_that_may_not_be_written_is_served(tmp_path, bundles, key):
    root = small_repository(tmp_path / "models")
    publish(bundles[0], root, servers=[], preflight=False)
    state = Repository(root).state
    if key:
        (state / "control.key").write_text(key)
    before = sorted(tmp_path.rglob("*"))
    # Root may write anywhere; without this capability even root may not.
    limit = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"] if os.geteuid() == 0 else []
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--exit-timeout", "5"]
    run = [*limit, sys.executable, "-m", "trieton_builder", "serve", str(root), *ports, "--json"]
    for folder in (root, state):
        folder.chmod(0o555)
    try:
        with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serving:
            lines = []
            while not lines or lines[-1] not in ("}\n", ""):
                lines.append(serving.stdout.readline())
            addresses = json.loads("".join(lines))
            with Client(addresses["grpc"]) as client:
                assert client.retrieve(HISTORIES[0]).bundle_id == id_of(bundles[0])
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(timeout=30) == 0
            said = serving.stderr.read()
    finally:
        for folder in (root, state):
            folder.chmod(0o755)
    assert f"{state} may not be written here: publishers name this server with --triton" in said
    assert ("give it one with --key-file" in said) == (not key)
    assert sorted(tmp_path.rglob("*")) == before
