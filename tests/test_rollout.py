"""Versions change under a real server without one failed request, and every failure leaves what served before."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rollout_help import altered, command, id_of, one_line, small_repository
from rollout_traffic import HISTORIES, Traffic, expected_answers
from trieton.bundle import Bundle
from trieton_builder.rollout import (
    Endpoint,
    LockedError,
    Repository,
    RolloutError,
    prune,
    publish,
    rollback,
    versions,
    withdraw,
)
from trieton_builder.rollout.canary import CanaryError
from trieton_builder.rollout.control import ServerControl
from trieton_builder.server.leftovers import SHM
from trieton_builder.server.process import TritonServer
from trieton_client import Client

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def bundles(make_tiny_bundle):
    """Four bundles of the same 300 item ids with different semantic IDs."""
    return [make_tiny_bundle(seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def world(tmp_path_factory, bundles):
    """A repository with one version and the server that all tests of this module change."""
    return World(tmp_path_factory.mktemp("world") / "models", bundles)


class World:
    def __init__(self, root: Path, bundles: list[Path]):
        self.root, self.bundles = root, bundles
        small_repository(root)
        assert publish(bundles[0], root, servers=[], preflight=False).outcome == "placed"
        self.repository = Repository(root)
        self.server = TritonServer(root, exit_timeout=2).start()

    @property
    def options(self) -> dict:
        return {"servers": [Endpoint(self.server.grpc_url, self.server.control_key)]}

    def publish(self, number: int, **options):
        return publish(self.bundles[number], self.root, **{"preflight": False, **self.options, **options})

    def answering(self) -> str:
        with Client(self.server.grpc_url, retries=0) as client:
            return client.retrieve(HISTORIES[0]).bundle_id

    def assert_sound(self) -> None:
        """Whole versions only, one of them answers, the server is ready, nothing is left in staging."""
        for version in self.repository.versions():
            Bundle.open(self.repository.path(version), verify=True)
        assert sorted(path.name for path in self.root.iterdir()) == [self.repository.model]
        extra = {path.name for path in self.repository.model_dir.iterdir()} - {"config.pbtxt"}
        assert extra == {str(version) for version in self.repository.versions()}
        assert self.answering() == self.repository.bundle_id(self.repository.current())
        control = ServerControl(self.server.grpc_url, self.repository, key=self.server.control_key)
        assert control.server_ready()
        control.close()


@pytest.fixture(scope="module", autouse=True)
def _stop(world):
    yield
    world.server.kill()


@pytest.mark.case("R01")
@pytest.mark.case("R05")
def test_publish_and_rollback_under_200_requests_a_second_fail_none_and_never_mix(world):
    old, new = id_of(world.bundles[0]), id_of(world.bundles[1])
    with Traffic(world.server.grpc_url, expected_answers(*world.bundles[:2])) as traffic:
        traffic.wait_for(old)
        done = world.publish(1, preflight=True)
        assert (done.outcome, done.bundle_id, done.previous) == ("serving", new, 1)
        traffic.wait_for(new)
        resident = {process.pid for process in world.server.processes()}
        back = rollback(world.root, **world.options)
        assert (back["from"], back["to"], back["bundle_id"]) == (2, 1, old)
        assert {process.pid for process in world.server.processes()} <= resident, "it was started anew"
        traffic.wait_for(old)
    assert traffic.failures == []
    assert traffic.answered_by() == [old, new]
    assert len(traffic.bundles) > 200
    world.assert_sound()


def test_a_version_number_is_never_used_twice_even_after_it_was_withdrawn(world):
    assert world.repository.versions() == [1]
    with pytest.raises(RolloutError, match="version 2: expected a number above 2, the highest ever used here"):
        world.publish(2, version=2)
    assert world.publish(2).version == 3


def test_without_the_memory_for_two_a_version_goes_and_comes_back_by_loading(world):
    before = world.answering()
    done = world.publish(1, keep_previous=False)
    control = ServerControl(world.server.grpc_url, world.repository, key=world.server.control_key)
    assert control.ready_versions() == [done.version]
    rollback(world.root, **world.options)
    assert control.ready_versions() == [done.previous]
    control.close()
    assert world.answering() == before


@pytest.mark.parametrize("preflight", [True, False])
def test_a_bundle_that_does_not_start_leaves_the_old_version_and_a_ready_server(world, tmp_path, preflight):
    before = world.answering()
    broken = altered(world.bundles[1], tmp_path / "broken", model_dot_py="raise RuntimeError('no such thing here')\n")
    with pytest.raises(OSError, match="no such thing here"):
        publish(broken, world.root, **world.options, preflight=preflight)
    assert world.answering() == before
    world.assert_sound()
    failed = versions(world.root, **world.options)[0]
    assert failed["state"] == "failed"
    assert "no such thing here" in failed["error"]
    if preflight:
        assert failed["error"].startswith(f"{broken}: version {failed['version']} does not start: ")


@pytest.mark.case("R02")
def test_an_index_of_another_codebook_size_is_refused_before_the_rename(world, tmp_path, make_tiny_retriever):
    other = make_tiny_retriever((8, 8, 16))
    spec = (other / "retriever.json").read_text()
    unfit = altered(world.bundles[1], tmp_path / "unfit", retriever__retriever_dot_json=spec)
    seen = []
    with pytest.raises(ValueError, match="codebook sizes"):
        publish(unfit, world.root, **world.options, listener=seen.append)
    assert "rename" not in {event.step for event in seen}
    world.assert_sound()


def test_a_canary_that_is_not_answered_as_expected_takes_the_version_back(world, tmp_path):
    before = world.answering()
    # A bundle whose server claims to be another one: everything loads, only the canary can see it.
    liar = altered(
        world.bundles[1],
        tmp_path / "liar",
        model_dot_py=(
            "from trieton.serving import TritonPythonModel as Model\n"
            "class TritonPythonModel(Model):\n"
            "    def initialize(self, args):\n"
            "        super().initialize(args)\n"
            "        self.writer._bundle_id = b'another'\n"
        ),
    )
    with pytest.raises(CanaryError, match=r"expected an answer of bundle \w+, got another"):
        publish(liar, world.root, **world.options, preflight=False)
    assert world.answering() == before
    world.assert_sound()


def test_a_client_pinned_to_a_withdrawn_version_gets_a_clear_error(world):
    import tritonclient.grpc as grpc
    from tritonclient.utils import InferenceServerException

    with grpc.InferenceServerClient(world.server.grpc_url) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("generative_retriever", [], model_version="2")
    assert re.search("version 2 .*not at ready state|version 2 is not found", caught.value.message())


# One process with everything imported forks once per line (bundle, step, state); the child publishes and kills itself
# there. The answer is how it ended.
VICTIMS = """
import os, signal, sys
from trieton.bundle import Bundle
from trieton_builder.rollout import Endpoint, publish
root, url, key = sys.argv[1:]
for line in sys.stdin:
    bundle, step, state = line.split()
    child = os.fork()
    if child == 0:
        def kill(event):
            if (event.step, event.state) == (step, state):
                os.kill(os.getpid(), signal.SIGKILL)
        publish(bundle, root, servers=[Endpoint(url, key)], preflight=step == "preflight", listener=kill)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def orphaned_regions() -> set[str]:
    """Shared memory whose server was started by a process that is gone."""
    return {path.name for path in SHM.glob("trieton-*") if not psutil.pid_exists(int(path.name.split("-")[1]))}


@pytest.mark.case("R03")
def test_a_publisher_killed_at_any_step_leaves_a_sound_repository_and_the_next_one_cleans_up(world):
    before, orphaned = world.answering(), orphaned_regions()
    steps = ["lock", "recover", "check", "stage", "verify", "preflight", "rename", "load", "ready", "canary", "record"]
    arguments = [sys.executable, "-c", VICTIMS, world.root, world.server.grpc_url, world.server.control_key]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victims:
        for number, step in enumerate([*steps, "done"]):
            # Killed before each step; the last one is killed behind the last step.
            name, state = ("record", "end") if step == "done" else (step, "begin")
            bundle = world.bundles[1 + number % 3]
            victims.stdin.write(f"{bundle} {name} {state}\n")
            victims.stdin.flush()
            assert victims.stdout.readline() == f"{-signal.SIGKILL}\n", step
            assert world.answering() in {before, id_of(bundle)}, f"killed before {step}"
            for version in world.repository.versions():
                Bundle.open(world.repository.path(version), verify=True)
        victims.stdin.close()
    assert world.answering() == id_of(bundle)  # the last one was killed when everything was done
    done = world.publish(0)
    world.assert_sound()
    assert done.version > len(steps) - 4  # every victim that had staged has used up its number
    assert list(world.repository.staging.iterdir()) == []
    assert not world.repository.intent_file.exists()
    states = {row["version"]: row["state"] for row in versions(world.root, **world.options)}
    assert [version for version, state in states.items() if state == "serving"] == [done.version]
    assert orphaned_regions() <= orphaned  # of other servers of this machine, which are not ours to judge


@pytest.mark.case("R04")
def test_a_full_disk_is_one_clear_error_and_nothing_is_lost(world):
    used = set(world.repository.state.rglob("*"))
    done = command("publish", world.bundles[1], world.root, "--triton", "none", limit="ulimit -f 40")
    assert "File too large" in one_line(done)
    world.assert_sound()
    assert set(world.repository.state.rglob("*")) == used


@pytest.mark.case("R04")
def test_a_read_only_repository_is_one_clear_error(tmp_path, world):
    copy = tmp_path / "models"
    publish(world.bundles[0], copy, servers=[], preflight=False)
    folder = copy / "generative_retriever"
    folder.chmod(0o555)
    try:
        # Root may write anywhere; without this capability even root may not.
        limit = "exec setpriv --bounding-set=-dac_override --inh-caps=-dac_override" if os.geteuid() == 0 else ""
        run = ["publish", world.bundles[1], copy, "--triton", "none", "--no-preflight"]
        if limit:
            arguments = [*limit.split()[1:], sys.executable, "-m", "trieton_builder", *map(str, run)]
            done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        else:
            done = command(*run)
    finally:
        folder.chmod(0o755)
    assert "Permission denied" in one_line(done)
    assert Repository(copy).versions() == [1]
    assert list((tmp_path / "models.rollout" / "staging").iterdir()) == []
    assert publish(world.bundles[1], copy, servers=[], preflight=False).version == 3


@pytest.mark.case("R04")
def test_two_publishers_exclude_each_other(world):
    with (
        world.repository.lock(),
        pytest.raises(LockedError, match=rf"process {os.getpid()} is working on {world.root}"),
    ):
        world.publish(1)


@pytest.mark.case("R06")
def test_publishes_in_a_row_leave_processes_files_and_shared_memory_flat(world):
    def figures() -> dict[str, int]:
        control = ServerControl(world.server.grpc_url, world.repository, key=world.server.control_key)
        control.load([world.repository.current()])
        for _ in range(100):  # the versions let go drain and end
            if len(world.server.processes()) == 2:
                break
            time.sleep(0.05)
        control.close()
        server, *stubs = world.server.processes()
        return {
            "processes": 1 + len(stubs),
            "descriptors": server.num_fds(),
            "regions": len(list(SHM.glob(f"{world.server.shm_prefix}*"))),
        }

    world.publish(1, keep=2)
    before = figures()
    for number in (2, 3):
        world.publish(number, keep=2)
        assert len(world.repository.versions()) == 2
    after = figures()
    deadline = time.monotonic() + 60
    while after != before and time.monotonic() < deadline:  # connections of clients that have gone close a little later
        time.sleep(0.2)
        after = figures()
    assert {name: after[name] - before[name] for name in after if after[name] > before[name]} == {}
    world.assert_sound()


@pytest.mark.case("R07")
def test_a_server_restarted_after_a_failed_publish_starts_with_the_last_good_version(world, tmp_path):
    good = world.answering()
    broken = altered(world.bundles[2], tmp_path / "broken", model_dot_py="raise RuntimeError('broken')\n")
    with pytest.raises(RolloutError, match="broken"):
        publish(broken, world.root, **world.options, preflight=False)
    world.server.kill()
    world.server = TritonServer(world.root, exit_timeout=2).start()
    assert world.answering() == good
    world.assert_sound()


def test_prune_keeps_what_a_server_holds_and_the_newest(world):
    present = world.repository.versions()
    newest = world.publish(2).version
    assert prune(world.root, keep=1, dry_run=True, **world.options) == prune(world.root, keep=1, **world.options)
    # The version before is still resident for a rollback, so it stays.
    assert world.repository.versions() == [present[-1], newest]


def test_withdrawing_the_current_version_lets_the_one_before_answer(world):
    older, current = world.repository.versions()
    done = withdraw(world.root, current, **world.options)
    assert (done["from"], done["to"]) == (current, older)
    assert world.answering() == world.repository.bundle_id(older)
    with pytest.raises(RolloutError, match=f"version {older} is the only one"):
        withdraw(world.root, older, **world.options)
    with pytest.raises(RolloutError, match="nothing to go back to"):
        rollback(world.root, **world.options)
    states = {row["version"]: row["state"] for row in versions(world.root, **world.options)}
    assert (states[older], states[current]) == ("serving", "withdrawn")
