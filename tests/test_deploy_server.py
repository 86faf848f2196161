"""What the containers run, run here: serve.sh and sync.py on the real server, and the dashboard against its metrics."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import psutil
import pytest
import trieton
import tritonclient.grpc
from scraped import settled
from trieton.bundle import Bundle
from trieton_builder.bundle.refresh import refresh
from trieton_builder.rollout.source import Source
from trieton_builder.server.installation import find_installation
from trieton_builder.server.process import GRPC_KEY_HEADER, TritonServer, choose_ports
from trieton_client import Client
from tritonclient.utils import InferenceServerException

DEPLOY = Path(__file__).parents[1] / "deploy"
SERVE = DEPLOY / "serve.sh"


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


sync = load_script(DEPLOY / "sync.py")
make_dashboard = load_script(DEPLOY / "grafana" / "make_dashboard.py")


@dataclass
class Pod:
    """A store, a follower beside the server that serve.sh started, and how to reach it."""

    store: Any
    follower: Any
    bundles: list[Path]
    ids: list[str]
    said: list[str]
    grpc_url: str
    http_url: str
    metrics_url: str
    process: subprocess.Popen[bytes]
    log: Path

    def answering(self) -> str:
        with Client(self.grpc_url) as client:
            return client.retrieve([1000, 1001]).bundle_id

    def metrics(self) -> str:
        with urllib.request.urlopen(self.metrics_url, timeout=5) as answer:
            return answer.read().decode()

    def versions(self) -> dict[str, tuple[str, bool]]:
        """{version: (bundle id, loaded)} of every version that the metrics have named."""
        lines = re.findall(r"^trieton_bundle_info{(.*)} (\S+)$", self.metrics(), re.MULTILINE)
        found = [(dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for labels, value in lines]
        return {labels["version"]: (labels["bundle_id"], value == 1) for labels, value in found}

    def answered(self) -> dict[str, float]:
        """{version: searches that it has answered}."""
        pattern = r'^trieton_searches_total{.*outcome="ok".*version="(\d+)"} (\S+)$'
        return {version: float(value) for version, value in re.findall(pattern, self.metrics(), re.MULTILINE)}

    def shows(self, bundle_id: str) -> bool:
        """Whether the metrics count a new search for the loaded version with this bundle, and for no other."""
        settled(self.metrics_url)
        before = self.answered()
        assert self.answering() == bundle_id
        for _ in range(300):
            grown = {v: n - before.get(v, 0) for v, n in self.answered().items() if n > before.get(v, 0)}
            if grown:
                versions = self.versions()
                return [(versions[v], n) for v, n in grown.items()] == [((bundle_id, True), 1)]
            time.sleep(0.1)
        return False


def container_environment(folder: Path) -> dict[str, str]:
    """What the image has and this machine has elsewhere: `tritonserver` on PATH, its backend, the stub's Python."""
    installation = find_installation()
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    for path in (*installation.backend.glob("*.so"), *installation.backend.glob("*.py"), installation.stub):
        (backend / path.name).symlink_to(path)
    library = folder / "lib"
    library.mkdir()
    (library / installation.libpython.name).symlink_to(installation.libpython)
    program = folder / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {installation.binary} --backend-directory={folder / "backends"} "$@"\n')
    program.chmod(0o755)
    packages = [sysconfig.get_path("purelib"), str(Path(trieton.__file__).parents[1])]
    return {
        **os.environ,
        "PATH": f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(packages),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": str(library),
        "TRIETON_ADDRESS": "127.0.0.1",
        "TRIETON_EXIT_TIMEOUT": "5",
    }


@pytest.fixture(scope="module")
def pod(make_tiny_bundle, tmp_path_factory) -> Iterator[Pod]:
    folder = tmp_path_factory.mktemp("pod")
    bundles = [make_tiny_bundle(seed=1), make_tiny_bundle(seed=1, base_constraint="even")]
    store = sync.Store(f"file://{folder / 'store'}")
    ids = [store.push(bundle) for bundle in bundles]
    store.point(ids[0])
    said: list[str] = []
    http, grpc, metrics = choose_ports((None, None, None))
    (folder / "srv").mkdir()
    follower = sync.Follower(store, folder / "srv" / "models", f"127.0.0.1:{grpc}", say=said.append)
    assert follower.step(), "the first bundle is placed before there is a server"
    environment = container_environment(folder) | {"TRIETON_REPOSITORY": str(folder / "srv" / "models")}
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    log = folder / "server.log"
    with open(log, "wb") as output:
        process = subprocess.Popen([SERVE, *ports], env=environment, stdout=output, stderr=subprocess.STDOUT)
    made = Pod(
        store, follower, bundles, ids, said,
        f"127.0.0.1:{grpc}", f"127.0.0.1:{http}", f"http://127.0.0.1:{metrics}/metrics", process, log,
    )  # fmt: skip
    try:
        wait_ready(made)
        yield made
    finally:
        if process.poll() is None:  # a stub outlives a server that is killed
            for part in (*psutil.Process(process.pid).children(recursive=True), process):
                with contextlib.suppress(psutil.Error):
                    part.kill()
            process.wait()


def wait_ready(pod: Pod, timeout: float = 150) -> None:
    """As the readiness probe of the chart asks."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and pod.process.poll() is None:
        try:
            url = f"http://{pod.http_url}/v2/models/generative_retriever/ready"
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.05)
    pytest.fail(f"not ready; the log ends with\n{pod.log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def exported(pod) -> dict[str, set[str]]:
    """{metric: names of its labels} of the running server, after one request."""
    pod.answering()
    deadline = time.monotonic() + 60
    while True:
        text = pod.metrics()
        if re.search(r'trieton_searches_total{.*outcome="ok".*} [1-9]', text) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:{(.*)})? \S+$", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels it is selected by) of every vector in a PromQL expression."""
    found: list[tuple[str, set[str]]] = []

    def look(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, {matcher.name for matcher in node.matchers.matchers}))
        return True

    promql_parser.walk(promql_parser.parse(expression), look)
    assert found, expression
    return iter(found)


def test_the_committed_dashboard_is_what_the_code_makes():
    committed = json.loads((DEPLOY / "grafana" / "dashboards" / "trieton.json").read_text())
    assert committed == make_dashboard.make_dashboard(), "run python deploy/grafana/make_dashboard.py"


@pytest.mark.server
def test_every_query_of_the_dashboard_names_metrics_and_labels_that_the_server_exports(exported):
    scraped = {"instance", "job", "namespace", "pod"}  # added by Prometheus
    for expression in make_dashboard.expressions(make_dashboard.make_dashboard()):
        for metric, labels in selectors(expression):
            assert metric in exported, expression
            assert labels <= exported[metric] | scraped, expression


@pytest.mark.server
def test_every_rule_names_metrics_that_the_server_exports(exported):
    import yaml

    groups = yaml.safe_load((DEPLOY / "helm" / "trieton" / "files" / "rules.yml").read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        for metric, _ in selectors(rule["expr"]):
            assert metric in exported, rule


@pytest.mark.server
def test_the_dashboard_shows_every_metric_of_ours(exported):
    shown = {
        metric
        for expression in make_dashboard.expressions(make_dashboard.make_dashboard())
        for metric, _ in selectors(expression)
    }
    ours = {metric for metric in exported if metric.startswith("trieton_")}
    assert len(ours) > 15
    # A beam search has as many levels as its index: the number says nothing that searches do not.
    assert ours - shown <= {"trieton_levels_total"}


@pytest.mark.server
def test_models_are_controlled_with_the_key_only(pod):
    with tritonclient.grpc.InferenceServerClient(pod.grpc_url) as client:
        for headers in ({}, {GRPC_KEY_HEADER: "guess"}):
            with pytest.raises(InferenceServerException, match="restricted"):
                client.load_model("generative_retriever", headers=headers, client_timeout=10)
        key = pod.follower.repository.key_file
        assert key.stat().st_mode & 0o077 == 0
        client.get_model_repository_index(headers={GRPC_KEY_HEADER: key.read_text()}, client_timeout=10)
    request = urllib.request.Request(f"http://{pod.http_url}/v2/repository/models/generative_retriever/load", b"{}")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=10)


@pytest.mark.server
@pytest.mark.case("W22")
@pytest.mark.case("W30")
def test_the_server_follows_the_pointer_of_the_store_and_back(pod):
    first, second = pod.ids
    assert pod.answering() == first
    assert not pod.follower.step(), "nothing has moved"
    pod.store.point(second)
    with pytest.MonkeyPatch.context() as patch:  # a cluster whose pods get a proxy in their environment
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            patch.setenv(name, "http://127.0.0.1:9")
        patch.delenv("no_proxy", raising=False)
        assert pod.follower.step()
    assert pod.answering() == second
    assert pod.shows(second)
    pod.store.point(first)
    assert pod.follower.step()
    assert "rolled back" in pod.said[-1]
    assert pod.answering() == first
    assert pod.shows(first), (
        "going back to a resident version initialises nothing, the dashboard must notice all the same"
    )


@pytest.mark.server
def test_a_bundle_that_is_damaged_on_the_way_is_refused_once_and_the_old_one_serves(pod, make_tiny_bundle):
    first = pod.ids[0]
    other = pod.store.push(make_tiny_bundle(seed=2))  # no file of it is published, so all are fetched
    damaged = Path(pod.store.root) / other / "catalog.safetensors"
    whole = damaged.read_bytes()
    try:
        damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        pod.store.point(other)
        assert not pod.follower.step()
        assert "refused" in pod.said[-1]
        said = len(pod.said)
        assert not pod.follower.step(), "not tried again at once"
        assert len(pod.said) == said
        assert pod.answering() == first
    finally:
        damaged.write_bytes(whole)
        pod.store.point(first)
        pod.follower.step()


def test_a_folder_with_another_bundle_in_it_is_refused_before_anything_is_copied(tiny_bundle, tmp_path):
    store = sync.Store(f"file://{tmp_path / 'store'}")
    real = store.push(tiny_bundle)
    wrong = "0123456789abcdef"
    (tmp_path / "store" / real).rename(tmp_path / "store" / wrong)
    store.point(wrong)
    said: list[str] = []
    (tmp_path / "srv").mkdir()
    follower = sync.Follower(store, tmp_path / "srv" / "models", "127.0.0.1:1", say=said.append)
    assert not follower.step()
    assert f"holds bundle {real}" in said[0]
    assert follower.repository.versions() == []


@pytest.mark.case("W09")
def test_a_bundle_that_drops_named_sets_is_followed_only_where_that_is_allowed(tiny_bundle, make_tiny_bundle, tmp_path):
    table = tmp_path / "sets.csv"
    table.write_text("item_id,even\n1000,1\n")
    refresh(make_tiny_bundle(), table, tmp_path / "fewer")
    store = sync.Store(f"file://{tmp_path / 'store'}")
    first, fewer = store.push(tiny_bundle), store.push(tmp_path / "fewer")
    said: list[str] = []
    (tmp_path / "srv").mkdir()
    follower = sync.Follower(store, tmp_path / "srv" / "models", "127.0.0.1:1", say=said.append)
    follower._publish(first, [])
    with pytest.raises(OSError, match=r"lacks named sets.*none_at_all, rare, third.*--allow-dropped-sets"):
        follower._publish(fewer, [])
    willing = sync.Follower(store, tmp_path / "srv" / "models", "127.0.0.1:1", allow_dropped_sets=True, say=said.append)
    willing._publish(fewer, [])
    assert said[-1] == f"bundle {fewer} is version 2, placed"


@pytest.mark.parametrize("text", ["", "../../etc", "latest", "0123456789abcde"])
def test_a_pointer_that_is_no_bundle_id_is_refused(tmp_path, text):
    store = sync.Store(f"file://{tmp_path}")
    (tmp_path / "current").write_text(text)
    with pytest.raises(ValueError, match="expected a bundle id of 16 hex digits"):
        store.current()


def test_pointing_at_a_bundle_that_is_not_there_changes_nothing(tmp_path):
    store = sync.Store(f"file://{tmp_path}")
    with pytest.raises(ValueError, match="no such bundle"):
        store.point("0123456789abcdef")
    assert list(tmp_path.iterdir()) == []


def test_a_pushed_bundle_comes_back_whole(tiny_bundle, tmp_path):
    store = sync.Store("memory://bundles")
    bundle_id = store.push(tiny_bundle)
    Source(f"{store.url}/{bundle_id}").copy_to(tmp_path / bundle_id)
    assert Bundle.open(tmp_path / bundle_id, verify=True).bundle_id == bundle_id


def serve(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SERVE], env={**os.environ, **environment}, capture_output=True, text=True, timeout=20, cwd=tmp_path
    )


def test_serve_refuses_a_missing_key_and_an_empty_repository_in_one_line(tmp_path):
    key, models = tmp_path / "key", tmp_path / "models"
    done = serve(tmp_path, TRIETON_REPOSITORY=str(models))
    assert done.returncode == 1
    assert "models.rollout/control.key is missing or empty" in done.stderr
    key.write_text("secret")
    done = serve(tmp_path, TRIETON_REPOSITORY=str(models), TRIETON_CONTROL_KEY_FILE=str(key))
    assert done.returncode == 1
    assert "has no version yet" in done.stderr
    (models / "generative_retriever" / "3").mkdir(parents=True)
    done = serve(tmp_path, TRIETON_REPOSITORY=str(models), TRIETON_CONTROL_KEY_FILE=str(key))
    assert done.returncode == 1
    assert "has no model.py" in done.stderr
    assert "secret" not in done.stderr + done.stdout


def test_serve_starts_the_server_as_the_embedded_one_is_started():
    embedded = TritonServer("models", control_key="key")._arguments(Path("backends"))
    here = SERVE.read_text()
    own = {"--id", "--backend-directory", "--backend-config", "--http-port", "--grpc-port", "--metrics-port"}
    for argument in embedded:
        name, _, value = argument.partition("=")
        assert name in here or name in own, f"serve.sh lacks {name}"
        if name.startswith(("--strict", "--metrics-config")) or name == "--model-control-mode":
            assert argument in here
        if "restricted" in name:
            assert value.removesuffix("=key") in here


def test_the_first_publish_makes_a_key_and_leaves_a_repository_with_versions_alone(tmp_path):
    version = tmp_path / "models" / "generative_retriever" / "4"
    version.mkdir(parents=True)
    command = [sys.executable, DEPLOY / "first_publish.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "has version 4 already" in done.stdout
    key = tmp_path / "models.rollout" / "control.key"
    assert len(key.read_text()) == 64
    assert key.stat().st_mode & 0o077 == 0


@pytest.mark.server
def test_the_server_ends_on_sigterm_in_time_with_exit_code_0(pod):
    # The last test of this file: it ends the server that the others use.
    assert pod.process.poll() is None
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(60) == 0, "held beyond its exit timeout"
