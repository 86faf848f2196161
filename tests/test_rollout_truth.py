"""A rollout says the truth: real requests decide, and the last line names what was withdrawn and what was not."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from cgroup import limit_memory, real_group
from rollout_help import altered, command, command_here, id_of, one_line, relay, small_repository
from rollout_traffic import HISTORIES
from trieton_builder.bundle.refresh import refresh
from trieton_builder.rollout import Endpoint, Repository, RolloutError, publish, rollback, versions, withdraw
from trieton_builder.rollout import control as control_module
from trieton_builder.rollout.control import ServerControl
from trieton_builder.rollout.targets import running_servers
from trieton_builder.server.process import TritonServer
from trieton_client import Client

MIB = 1 << 20


@pytest.fixture(scope="module")
def bundles(make_tiny_bundle):
    return [make_tiny_bundle(seed=seed) for seed in range(3)]


class Shop:
    """A repository and its server."""

    def __init__(self, root: Path, bundles: list[Path]):
        self.bundles = bundles
        self.root = small_repository(root)
        publish(bundles[0], self.root, servers=[], preflight=False)
        self.repository = Repository(self.root)
        self.start()

    def start(self) -> None:
        self.server = TritonServer(self.root, exit_timeout=2, control_key="key").start()
        self.servers = [Endpoint(self.server.grpc_url, "key")]

    def publish(self, bundle: Path, **options):
        return publish(bundle, self.root, **{"preflight": False, "servers": self.servers, **options})

    def two(self) -> tuple[int, int]:
        """Two versions, both resident: (the one before, the current one)."""
        done = self.publish(self.bundles[1], keep_previous=True, keep=2)
        return done.previous, done.version

    def control(self) -> ServerControl:
        return ServerControl(self.server.grpc_url, self.repository, key="key")

    def answering(self) -> str:
        with Client(self.server.grpc_url, retries=0) as client:
            return client.retrieve(HISTORIES[0]).bundle_id

    def stubs(self) -> dict[int, int]:
        """{version: id of the process that holds it}; one that is ending may live on beside its successor."""
        found = {}
        for process in sorted(self.server.processes()[1:], key=lambda process: process.create_time()):
            with contextlib.suppress(psutil.Error):  # one that was killed
                version = re.search(rf"{self.repository.model}/(\d+)/model\.py", " ".join(process.cmdline()))
                if version:
                    found[int(version[1])] = process.pid
        return found

    def signal(self, version: int, number: int) -> int:
        pid = self.stubs()[version]
        os.kill(pid, number)
        return pid

    def held(self) -> list[int]:
        control = self.control()
        try:
            return control.ready_versions()
        finally:
            control.close()


@pytest.fixture(scope="module")
def shop(tmp_path_factory, bundles):
    shop = Shop(tmp_path_factory.mktemp("shop") / "models", bundles)
    yield shop
    shop.server.kill()


# A process that is dead or hangs although the server calls its version ready


@pytest.mark.server
@pytest.mark.case("W29")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hanging"])
def test_a_rollback_to_a_version_that_does_not_answer_starts_it_anew_first(shop, how):
    before, current = shop.two()
    pid = shop.signal(before, how)
    seen = []
    back = rollback(shop.root, servers=shop.servers, listener=seen.append)
    assert shop.answering() == back["bundle_id"] == shop.repository.bundle_id(before)
    assert (back["to"], back["withdrawn"]) == (before, [current])
    assert any(f"version {before} is ready but does not answer" in e.text for e in seen if e.state == "note")
    assert shop.held() == [before]
    assert shop.stubs()[before] != pid


@pytest.mark.server
@pytest.mark.case("W29")
def test_a_rollback_to_a_version_that_cannot_start_anew_withdraws_nothing(shop, monkeypatch):
    before, current = shop.two()
    file = shop.repository.path(before) / "model.py"
    text = file.read_text()
    shop.signal(before, signal.SIGKILL)
    try:
        file.write_text("raise RuntimeError('no room in this shop')\n")
        with pytest.raises(RolloutError, match=r"no room in this shop.*; the rollback withdrew nothing$"):
            rollback(shop.root, servers=shop.servers)
    finally:
        file.write_text(text)
    assert shop.answering() == shop.repository.bundle_id(current)
    assert shop.repository.versions()[-2:] == [before, current]
    assert shop.repository.read_intent() is None


@pytest.mark.server
@pytest.mark.case("W29")
def test_a_failed_publish_goes_back_to_a_process_that_answers(shop, tmp_path):
    before = shop.repository.current()
    # It starts and answers, but as another bundle, so only the canary refuses it.
    liar = altered(
        shop.bundles[2],
        tmp_path / "liar",
        model_dot_py=(
            "from trieton.serving import TritonPythonModel as Model\n"
            "class TritonPythonModel(Model):\n"
            "    def initialize(self, args):\n"
            "        super().initialize(args)\n"
            "        self.writer._bundle_id = b'another'\n"
        ),
    )

    def kill(event):
        if (event.step, event.state) == ("load", "end"):
            shop.signal(before, signal.SIGKILL)

    with pytest.raises(RolloutError, match=rf"got another; version \d+ is withdrawn, version {before} answers on "):
        shop.publish(liar, keep_previous=True, listener=kill)
    assert shop.answering() == shop.repository.bundle_id(before)
    assert shop.held() == [before]


@pytest.mark.server
@pytest.mark.case("W28")
def test_a_process_killed_during_a_load_is_noticed_and_said(shop):
    before = shop.repository.current()

    def kill(event):
        if (event.step, event.state) == ("load", "end"):
            shop.signal(before, signal.SIGKILL)

    done = shop.publish(shop.bundles[2], keep_previous=True, listener=kill)
    assert done.outcome == "serving"
    (note,) = done.notes
    assert f"version {before} does not stay resident on {shop.server.grpc_url}" in note
    assert shop.held() == [done.version]
    assert shop.answering() == done.bundle_id
    new = shop.repository.current()

    def kill_new(event):
        if (event.step, event.state) == ("ready", "end"):
            shop.signal(new + 1, signal.SIGKILL)

    with pytest.raises(RolloutError, match=rf"not healthy.*; version {new + 1} is withdrawn, version {new} answers on"):
        shop.publish(shop.bundles[1], listener=kill_new)
    assert shop.answering() == done.bundle_id


@pytest.mark.server
@pytest.mark.case("W28")
def test_a_publish_asks_the_group_of_the_server_for_memory_and_not_the_machine(shop):
    seen = []
    with real_group("memory") as group:
        limit_memory(group, 500 * MIB)
        processes = [process.pid for process in shop.server.processes() if process.status() != psutil.STATUS_ZOMBIE]
        own = Path(f"/proc/{shop.server.pid}/cgroup").read_text()
        for pid in processes:
            (group[1] / "cgroup.procs").write_text(str(pid))
        try:
            before = shop.repository.current()
            done = shop.publish(shop.bundles[0], listener=seen.append)
        finally:
            for process in shop.server.processes():
                (group[1].parent / "cgroup.procs").write_text(str(process.pid))
    assert own == Path(f"/proc/{shop.server.pid}/cgroup").read_text()
    (said,) = [event.text for event in seen if "little memory" in event.text]
    assert 0 < int(re.search(r"server, (\d+) MiB", said)[1]) <= 500
    assert f"version {before} does not stay resident" in said
    assert shop.held() == [done.version]


@pytest.mark.server
def test_the_memory_of_a_server_elsewhere_is_called_unknown(shop):
    seen = []
    with relay(shop.server.grpc_url) as url:  # what listens there is no server, as with the port of a container
        done = shop.publish(shop.bundles[1], servers=[Endpoint(url, "key")], listener=seen.append)
    (said,) = [event.text for event in seen if "is not known here" in event.text]
    assert said.startswith(f"{url}: how much memory its server may take")
    assert shop.held() == [done.previous, done.version]


# What went, and what is left


@pytest.mark.server
def test_the_last_line_of_a_rollback_names_every_version_that_it_withdrew(shop):
    versions_out = [shop.publish(shop.bundles[number]).version for number in (0, 1, 2)]
    target = shop.repository.versions()[-4]
    done = command("rollback", shop.root, "--to", target, "--triton", shop.server.grpc_url, TRIETON_CONTROL_KEY="key")
    first, second, third = versions_out
    assert done.stdout.startswith(f"versions {first}, {second} and {third} are withdrawn, version {target} "), done
    assert shop.answering() == shop.repository.bundle_id(target)


@pytest.mark.server
def test_withdrawing_an_older_version_proves_that_the_current_one_answers(shop):
    before, current = shop.two()
    shop.signal(current, signal.SIGKILL)
    done = withdraw(shop.root, before, servers=shop.servers)
    assert (done["to"], done["withdrawn"]) == (current, [before])
    assert shop.answering() == shop.repository.bundle_id(current)


@pytest.mark.server
def test_a_version_whose_folder_was_removed_by_hand_is_gone_back_from(shop):
    before, current = shop.two()
    shop.repository.remove(shop.repository.path(current))
    back = rollback(shop.root, servers=shop.servers)
    assert (back["from"], back["to"], back["withdrawn"]) == (current, before, [])
    assert shop.answering() == shop.repository.bundle_id(before)
    assert shop.publish(shop.bundles[0]).version > current


@pytest.mark.server
@pytest.mark.case("W58")
@pytest.mark.parametrize("how", ["killed", "hanging"])
def test_a_server_that_goes_away_while_a_publish_waits_is_named_and_what_was_withdrawn(shop, how, monkeypatch):
    before = shop.repository.current()
    monkeypatch.setattr(control_module, "QUICK", 1.0)
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
    new = before + 1

    def strike(event):
        if (event.step, event.state) == ("load", "begin"):
            threading.Timer(0.3, os.kill, (shop.server.pid, number)).start()

    server = shop.server
    try:
        with pytest.raises(RolloutError) as caught:
            shop.publish(shop.bundles[1], load_timeout=3.0, version=None, listener=strike)
    finally:
        if how == "hanging":
            os.kill(server.pid, signal.SIGCONT)
        server.kill()
        shop.start()
    text = str(caught.value)
    gone = "went away during the load of version" if how == "killed" else "hangs: no answer to the load of version"
    assert text.startswith(f"{server.grpc_url}: the server {gone} ")
    new = max(row["version"] for row in versions(shop.root, servers=[]))
    assert f"; version {new} is withdrawn, version {before} is the current one" in text
    assert not re.search(r"StatusCode|Socket|ipv4|grpc_status", text)
    assert shop.repository.current() == before
    assert shop.answering() == shop.repository.bundle_id(before)


@pytest.mark.case("W58")
def test_ctrl_c_also_says_what_was_withdrawn(tmp_path, bundles):
    root = small_repository(tmp_path / "models")
    publish(bundles[0], root, servers=[], preflight=False)

    def interrupt(event):
        if (event.step, event.state) == ("rename", "end"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="version 2 is withdrawn, version 1 is the current one"):
        publish(bundles[1], root, servers=[], preflight=False, listener=interrupt)


# Two servers on one repository


@pytest.mark.server
@pytest.mark.case("W53")
def test_two_servers_on_one_repository_are_both_known_and_each_leaves_only_its_own_record(tmp_path, bundles):
    root = small_repository(tmp_path / "models")
    publish(bundles[0], root, servers=[], preflight=False)
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--exit-timeout", "2"]
    run = [sys.executable, "-m", "trieton_builder", "serve", str(root), *ports, "--json"]
    serving = []
    try:
        addresses = []
        for _ in range(2):
            serving.append(subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            lines = []
            while not lines or lines[-1] not in ("}\n", ""):
                lines.append(serving[-1].stdout.readline())
            addresses.append(json.loads("".join(lines))["grpc"])
        assert running_servers(Repository(root)) == addresses
        done = publish(bundles[1], root, preflight=False)
        assert done.servers == addresses
        for url in addresses:
            with Client(url) as client:
                assert client.retrieve(HISTORIES[0]).bundle_id == id_of(bundles[1])
        serving[1].send_signal(signal.SIGTERM)
        assert serving[1].wait(timeout=30) == 0
        assert f"is also served on {addresses[0]}" in serving[1].stderr.read()
        assert running_servers(Repository(root)) == addresses[:1]
    finally:
        for process in serving:
            process.terminate()
            process.wait(timeout=30)
            process.stdout.close()
            process.stderr.close()
    assert running_servers(Repository(root)) == []


# Sets that would vanish, rules that allow nothing


def sets_table(path: Path, *names: str) -> Path:
    rows = [",".join(["item_id", *names]), *(f"{1000 + i},{','.join('1' * len(names))}" for i in range(300))]
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.mark.case("W09")
def test_a_bundle_that_lacks_named_sets_of_the_live_one_needs_a_flag(tmp_path, bundles):
    root, fewer = tmp_path / "models", tmp_path / "fewer"
    publish(bundles[0], root, servers=[], preflight=False)
    refresh(bundles[0], sets_table(tmp_path / "sets.csv", "even", "fresh"), fewer)
    for dry in ([], ["--dry-run"]):
        said = one_line(command_here("publish", fewer, root, "--no-preflight", *dry))
        assert "none_at_all, rare, third" in said
        assert "even" not in said
        assert "--allow-dropped-sets" in said
    assert Repository(root).versions() == [1]
    done = command_here("publish", fewer, root, "--no-preflight", "--allow-dropped-sets")
    assert (done.returncode, Repository(root).current()) == (0, 2), done.stderr
    more = tmp_path / "more"
    refresh(bundles[0], sets_table(tmp_path / "sets.csv", "even", "fresh", "new"), more)
    assert publish(more, root, servers=[], preflight=False).version == 3  # more sets are no loss


@pytest.mark.case("W57")
def test_a_base_constraint_that_allows_nothing_is_refused(tmp_path, make_tiny_bundle, bundles):
    for base in ("none_at_all", "even and none_at_all", "rare and not rare"):
        with pytest.raises(ValueError, match="allows none of the 300 items"):
            make_tiny_bundle(base_constraint=base)
    with pytest.raises(ValueError, match="empty sets: none_at_all"):
        make_tiny_bundle(base_constraint="even and none_at_all")
    # A bundle of an earlier release may have one.
    old = tmp_path / "old"
    altered(bundles[0], old, fields={"base_constraint": "none_at_all"})
    for preflight in (True, False):
        with pytest.raises(RolloutError, match=rf"^{old}: the base constraint 'none_at_all' allows none of the 300"):
            publish(old, tmp_path / "models", servers=[], preflight=preflight)
    assert not (tmp_path / "models").exists()


# Files that are there already


@pytest.mark.server
def test_a_publish_after_a_refresh_links_what_the_live_version_has(shop, tmp_path):
    current = shop.repository.path(shop.repository.current())
    names = json.loads((current / "manifest.json").read_text())["sets"]
    new = tmp_path / "new"
    refresh(current, sets_table(tmp_path / "sets.csv", *names, "fresh"), new)
    done = shop.publish(new, keep_previous=True)
    version = shop.repository.path(done.version)
    for name in ("index.safetensors", "catalog.safetensors", "retriever/prefill.onnx", "retriever/decode.onnx"):
        assert os.path.samefile(version / name, current / name)
    for name in ("sets.safetensors", "manifest.json", "model.py"):
        assert not os.path.samefile(version / name, current / name)
        assert not os.path.samefile(version / name, new / name)
    assert shop.held() == [int(current.name), done.version]
    assert shop.answering() == done.bundle_id


def test_files_of_the_users_bundle_are_never_linked_and_a_damaged_published_file_is_not_taken(tmp_path, bundles):
    root, again = tmp_path / "models", tmp_path / "again"
    publish(bundles[0], root, servers=[], preflight=False)
    first, second = Repository(root).path(1), Repository(root).path(2)
    assert not any(os.path.samefile(first / name, bundles[0] / name) for name in os.listdir(first))
    altered(bundles[0], again, fields={"provenance": {"again": 1}})
    with open(first / "index.safetensors", "r+b") as file:  # as a careless tool would
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    seen = []
    publish(again, root, servers=[], preflight=False, listener=seen.append)
    assert any("everything is copied" in event.text for event in seen)
    assert (second / "index.safetensors").read_bytes() == (bundles[0] / "index.safetensors").read_bytes()
