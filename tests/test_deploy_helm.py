"""The Helm chart: linted and rendered by Helm itself (a library of it), checked against the Kubernetes schemas."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import promql_parser
import pytest
import yaml

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "trieton"
SOURCE: dict[str, Any] = {"source": {"url": "s3://bucket/trieton"}}
ON = {"enabled": True}
EVERYTHING = {
    "source": {"url": "s3://bucket/trieton", "secretName": "keys"},
    "autoscaling": ON,
    "serviceMonitor": ON,
    "prometheusRule": ON,
    "gpu": ON,
    "extraArgs": ["--log-verbose=1"],
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "image": {"pullSecrets": [{"name": "registry"}]},
}
KUBERNETES = ("1.31", "1.33")


def render(values: dict[str, Any]) -> dict[str, Any]:
    """{kind (and name where there are several): manifest}."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="demo", namespace="prod")
    manifests: dict[str, Any] = {}
    for name, text in sorted(files.items()):
        if name.endswith(".yaml"):
            for manifest in filter(None, yaml.safe_load_all(text)):
                kind = manifest["kind"]
                manifests[f"{kind} {manifest['metadata']['name']}" if kind == "Service" else kind] = manifest
    return manifests


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    return render(EVERYTHING)


@pytest.fixture(scope="module")
def pod(everything) -> dict[str, Any]:
    return everything["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def server(pod) -> dict[str, Any]:
    (container,) = pod["containers"]
    return container


@pytest.fixture(scope="module")
def sync(pod) -> dict[str, Any]:
    (container,) = pod["initContainers"]
    return container


def test_helm_lint_finds_nothing_to_complain_about():
    report = helm.lint(CHART, SOURCE, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("values", [SOURCE, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_follows_the_schema_of_kubernetes(values, version):
    kinds = []
    for manifest in render(values).values():
        if not manifest["apiVersion"].startswith("monitoring.coreos.com"):  # a resource of the Prometheus operator
            kubernetes_validate.validate(manifest, version, strict=True)
            kinds.append(manifest["kind"])
    expected = {"Deployment", "Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"}
    assert expected <= set(kinds)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "source.url"),
        (SOURCE | {"replicas": 3}, "replicas"),
        (SOURCE | {"image": {"tag": "latest"}}, "tag"),
        (SOURCE | {"shmSize": "much"}, "shmSize"),
        (SOURCE | {"sync": {"keep": 1}}, "keep"),
    ],
)
def test_wrong_values_are_refused_by_name(values, said):
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmError, match=said):
        chart.render(values, name="demo", namespace="prod")


def test_readiness_asks_the_model_and_liveness_sends_a_real_request(server):
    for probe in ("startupProbe", "readinessProbe"):
        assert server[probe]["httpGet"]["path"] == "/v2/models/generative_retriever/ready"
    assert server["livenessProbe"]["exec"]["command"][:3] == ["trieton", "probe", "--live"]
    assert server["livenessProbe"]["timeoutSeconds"] > 5


def test_a_pod_has_time_to_finish_its_requests(pod, server):
    pause = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    (exit_timeout,) = [entry["value"] for entry in server["env"] if entry["name"] == "TRIETON_EXIT_TIMEOUT"]
    assert pod["terminationGracePeriodSeconds"] >= pause + int(exit_timeout) + 10


def test_shared_memory_is_in_memory_and_bounded(pod, server):
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in server["volumeMounts"]


def test_only_the_side_car_may_write_versions(server, sync):
    (of_server,) = [mount for mount in server["volumeMounts"] if mount["name"] == "repository"]
    (of_sync,) = [mount for mount in sync["volumeMounts"] if mount["name"] == "repository"]
    assert of_server["readOnly"] is True
    assert not of_sync.get("readOnly")


def test_models_are_controlled_from_inside_the_pod_only(everything, pod, sync):
    assert "--server=127.0.0.1:8001" in sync["args"]
    # The key is made in the pod: no secret of the cluster holds it, none is mounted.
    assert not any("secret" in volume for volume in pod["volumes"])
    assert "Secret" not in everything


def test_the_side_car_starts_before_the_server_and_ends_after_it(sync):
    assert sync["restartPolicy"] == "Always"
    assert sync["startupProbe"]["exec"]["command"][:2] == ["trieton-sync", "check"]


def test_the_side_car_is_called_with_options_that_it_has(sync):
    script = CHART.parents[1] / "sync.py"
    done = subprocess.run([sys.executable, script, "follow", "--help"], capture_output=True, text=True, timeout=60)
    options = [argument.split("=")[0] for argument in sync["args"] if argument.startswith("--")]
    assert len(options) == 3
    assert all(option in done.stdout for option in options), done.stdout


def test_no_container_is_root_or_writes_to_its_image(pod, server, sync):
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in (server, sync):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_a_gpu_is_asked_for_without_losing_the_other_limits(server):
    assert server["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 1}


def test_pods_are_added_by_the_time_requests_wait(everything):
    scaler = everything["HorizontalPodAutoscaler"]["spec"]
    assert "replicas" not in everything["Deployment"]["spec"], "would undo what the autoscaler did at every upgrade"
    (metric,) = scaler["metrics"]
    assert metric["pods"]["target"]["averageValue"] == "5m"
    recorded = [rule["record"] for rule in rules(everything) if "record" in rule]
    assert metric["pods"]["metric"]["name"] in recorded


def test_the_rules_are_valid_promql_and_reach_prometheus_with_their_placeholders(everything):
    for rule in rules(everything):
        promql_parser.parse(rule["expr"])
        if "alert" in rule:
            assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


def test_the_monitor_selects_the_service_that_has_the_metrics_port(everything):
    wanted = everything["ServiceMonitor"]["spec"]
    service = everything["Service demo-trieton-headless"]
    assert wanted["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert wanted["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert (
        not wanted["selector"]["matchLabels"].items()
        <= everything["Service demo-trieton"]["metadata"]["labels"].items()
    )


def test_every_selector_finds_the_pods_and_nothing_depends_on_the_release_version(everything):
    labels = everything["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        everything["Deployment"]["spec"]["selector"]["matchLabels"],
        everything["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        everything["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        everything["Service demo-trieton"]["spec"]["selector"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert "helm.sh/chart" not in selector, "a selector of a Deployment cannot be changed later"


def test_an_empty_list_of_clients_admits_nobody():
    policy = render(SOURCE | {"networkPolicy": {"enabled": True, "clients": [], "monitoring": []}})["NetworkPolicy"]
    assert policy["spec"]["ingress"] == []
    assert "Ingress" in policy["spec"]["policyTypes"]
    for rule in render(SOURCE)["NetworkPolicy"]["spec"]["ingress"]:
        assert rule["from"], "a rule without senders admits everybody"


def rules(manifests: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in manifests["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]]
