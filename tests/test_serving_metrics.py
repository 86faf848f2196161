"""Figures of the served model: what they count, which version they name, and that alerts see what goes wrong."""

import importlib.util
import itertools
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
import yaml
from scraped import evaluate, scrape, settled, value
from tiny_bundle import SIZES, tiny_catalogue
from trieton.bundle import Bundle
from trieton_builder.bundle.bls import write_bls_retriever
from trieton_builder.bundle.model_config import render_config
from trieton_builder.bundle.write import write_bundle
from trieton_builder.server.process import GRPC_KEY_HEADER, TritonServer
from trieton_client import Client, InvalidRequestError
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.server
MODEL = "generative_retriever"
DEPLOY = Path(__file__).parents[1] / "deploy"
GOOD, BROKEN = "1", "2"


@pytest.fixture(scope="module")
def two_versions(tiny_bundle, make_tiny_retriever, tmp_path_factory):
    """A server that holds two versions, two processes each. Version 2 is broken: it asks a model that is not there."""
    root = tmp_path_factory.mktemp("versions")
    write_bls_retriever(make_tiny_retriever(SIZES), root / "asks", version=9)
    write_bundle(root / "broken", index=Bundle.open(tiny_bundle).index, retriever_dir=root / "asks")
    model = root / "models" / MODEL
    model.mkdir(parents=True)
    (model / "config.pbtxt").write_text(render_config(instances=2, max_batch_size=2) + "version_policy { all {} }\n")
    shutil.copytree(tiny_bundle, model / GOOD)
    shutil.copytree(root / "broken", model / BROKEN)
    with TritonServer(root / "models", exit_timeout=3) as server:
        yield server


def ask(client: triton.InferenceServerClient, version: str, **parameters: int) -> None:
    tensor = triton.InferInput("history", [1, 1], "INT64").set_data_from_numpy(np.array([[1003]]))
    client.infer(MODEL, [tensor], model_version=version, parameters=parameters, client_timeout=30)


def test_figures_follow_what_was_asked(served):
    before = settled(served.metrics_url)
    with Client(served.grpc_url) as client:
        for _ in range(5):
            client.retrieve([1003, 5], include=[1001, 6], exclude=[7])
        with pytest.raises(InvalidRequestError):
            client.retrieve([1003], num_results=1000)
    after = settled(served.metrics_url)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, model=MODEL, **labels) - value(before, name, model=MODEL, **labels)

    assert grown("trieton_searches_total", outcome="ok") == 5
    assert grown("trieton_searches_total", outcome="invalid") == 1
    assert grown("trieton_searches_total", outcome="failed") == 0
    assert grown("trieton_short_results_total") == 5
    assert grown("trieton_candidates_total") == 5 * 3  # one allowed child at each level
    assert grown("trieton_unknown_items_total") == 5
    assert grown("trieton_unknown_listed_items_total") == 10
    assert grown("trieton_certified_results_total") == 5
    assert grown("trieton_stage_seconds_total", stage="decode") > 0
    assert value(after, "trieton_index_items", model=MODEL) == len(tiny_catalogue().ids)
    assert all(after[key] >= number for key, number in before.items() if key[0].endswith("_total"))


@pytest.mark.case("W22")
def test_each_version_counts_for_itself_and_each_series_has_one_writer(two_versions, tiny_bundle):
    before = settled(two_versions.metrics_url)
    with triton.InferenceServerClient(two_versions.grpc_url) as client:
        for milliseconds in (0, 100, 400, 0, 0):
            ask(client, GOOD)
            time.sleep(milliseconds / 1000)
            with pytest.raises(InferenceServerException, match="the search failed"):
                ask(client, BROKEN)
    after = settled(two_versions.metrics_url)
    counted = {
        (version, outcome): value(after, "trieton_searches_total", version=version, outcome=outcome)
        - value(before, "trieton_searches_total", version=version, outcome=outcome)
        for version, outcome in itertools.product((GOOD, BROKEN), ("ok", "failed"))
    }
    assert counted == {(GOOD, "ok"): 5, (GOOD, "failed"): 0, (BROKEN, "ok"): 0, (BROKEN, "failed"): 5}
    ours = [(name, dict(labels)) for name, labels in after if name.startswith("trieton_")]
    writers = {(labels["version"], labels["model_instance"]) for _, labels in ours}
    assert writers == set(itertools.product((GOOD, BROKEN), (f"{MODEL}_0_0", f"{MODEL}_0_1")))
    good = Bundle.open(tiny_bundle).bundle_id
    assert value(after, "trieton_bundle_info", version=GOOD, bundle_id=good) == 2, "1 for each of the two processes"


@pytest.mark.case("W21")
def test_twelve_failed_requests_fire_the_alert_and_move_the_panel(two_versions):
    alert = next(
        rule["expr"]
        for group in yaml.safe_load((DEPLOY / "helm/trieton/files/rules.yml").read_text())["groups"]
        for rule in group["rules"]
        if rule.get("alert") == "TrietonRequestsFail"
    )
    dashboard = load_dashboard()
    panel = next(panel for _, row in dashboard.ROWS for panel in row if panel.title == "Failed")
    shown = dashboard.filled(panel.queries[0][0])
    quiet = settled(two_versions.metrics_url)
    with triton.InferenceServerClient(two_versions.grpc_url) as client:
        for _ in range(12):
            ask(client, GOOD)
            with pytest.raises(InferenceServerException, match="num_results"):
                ask(client, GOOD, num_results=0)
        good = settled(two_versions.metrics_url)
        assert evaluate(alert, quiet, good) == {}, "bad requests are not the model's failures"
        assert list(evaluate(shown, quiet, good).values()) == [0]
        for _ in range(12):
            with pytest.raises(InferenceServerException, match="the search failed"):
                ask(client, BROKEN)
    bad = settled(two_versions.metrics_url)
    assert list(evaluate(alert, good, bad).values()) == [12]
    assert list(evaluate(shown, good, bad).values()) == [1]


def load_dashboard():
    path = DEPLOY / "grafana" / "make_dashboard.py"
    spec = importlib.util.spec_from_file_location("make_dashboard_here", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.case("W22")
def test_the_gauges_of_an_unloaded_version_are_0_and_its_counters_stay(two_versions):
    # The last test of this file: it unloads the model that the others ask.
    before = settled(two_versions.metrics_url)
    headers = {GRPC_KEY_HEADER: two_versions.control_key}
    with triton.InferenceServerClient(two_versions.grpc_url) as client:
        client.unload_model(MODEL, headers=headers)
    deadline = time.monotonic() + 20
    gauges = ("trieton_bundle_info", "trieton_index_items", "trieton_plane_cache_bytes", "trieton_ready_time_seconds")
    while time.monotonic() < deadline:
        after = scrape(two_versions.metrics_url)
        if not any(value(after, name) for name in gauges):
            break
        time.sleep(0.1)
    assert {name: value(after, name) for name in gauges} == dict.fromkeys(gauges, 0)
    counters = {key: number for key, number in before.items() if key[0].startswith("trieton_searches_total")}
    assert counters == {key: after[key] for key in counters}
