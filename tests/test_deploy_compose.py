"""The Compose file and the images, as far as they can be checked without a container engine."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file as a dictionary, with YAML's merges done, refused unless it follows the Compose specification."""
    loaded = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    checked = PyCompose.from_yaml(yaml.safe_dump(loaded))
    checked.validate()  # names of networks, volumes, secrets and configs that services use exist
    return loaded


def seconds(text: str) -> int:
    minutes, rest = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", text).groups()  # type: ignore[union-attr]
    return 60 * int(minutes or 0) + int(rest or 0)


def servers(compose: dict[str, Any]) -> list[dict[str, Any]]:
    return [compose["services"][name] for name in ("server", "server-gpu")]


def test_every_port_is_published_on_loopback_only(compose):
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert len(published) > 5
    assert all(port.startswith("127.0.0.1:") for port in published), published


def test_every_image_has_a_pinned_tag(compose):
    stages = (ROOT / "deploy" / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", stages, re.MULTILINE))
    images = [service["image"] for service in compose["services"].values()]
    images += [
        re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], image)
        for image in re.findall(r"^FROM (\S+)", stages, re.MULTILINE)
        if image != "builder"
    ]
    for image in images:
        assert re.search(r":v?\d+\.\d+[.\w-]*$", image), image


def test_every_file_that_is_mounted_or_built_from_exists(compose):
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            if isinstance(volume, str) and volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).exists(), (name, volume)
                assert volume.endswith(":ro"), (name, volume)
        if "build" in service:
            dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
            assert re.search(rf"^FROM \S+ AS {service['build']['target']}$", dockerfile, re.MULTILINE), name


def test_the_server_reads_the_repository_and_cannot_write_it(compose):
    for server in servers(compose):
        (mount,) = server["volumes"]
        assert mount["source"] == "trieton"
        assert mount["read_only"] is True
        assert server["read_only"] is True


def test_the_server_gets_longer_to_end_than_its_requests_in_flight(compose):
    for server in servers(compose):
        assert seconds(server["stop_grace_period"]) >= int(server["environment"]["TRIETON_EXIT_TIMEOUT"]) + 10


def test_the_server_has_more_shared_memory_than_the_default_and_is_probed_with_a_real_request(compose):
    for server in servers(compose):
        assert server["shm_size"] == "1gb"
        assert server["healthcheck"]["test"][:3] == ["CMD", "trieton", "probe"]


def test_the_profiles_cpu_and_gpu_bring_the_same_services_and_one_server_each(compose):
    def enabled(profile: str) -> set[str]:
        return {name for name, service in compose["services"].items() if profile in service["profiles"]}

    assert enabled("cpu") - {"server"} == enabled("gpu") - {"server-gpu"} == {"builder", "prometheus", "grafana"}
    for profile in ("cpu", "gpu"):
        for name in enabled(profile):
            assert set(compose["services"][name].get("depends_on", {})) <= enabled(profile), name


def test_prometheus_scrapes_the_name_that_both_servers_answer_to(compose):
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    for server in servers(compose):
        assert target.split(":")[0] in server["networks"]["default"]["aliases"]


def test_no_container_gains_privileges(compose):
    for name, service in compose["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name


def test_the_dockerfile_passes_hadolint_and_its_images_do_not_run_as_root():
    dockerfile = ROOT / "deploy" / "Dockerfile"
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    stages = dockerfile.read_text().split("\nFROM ")[1:]
    for stage in stages:
        if not stage.startswith("builder"):  # the last stage inherits its user
            assert re.findall(r"^USER (\S+)$", stage, re.MULTILINE)[-1] == "1000:1000"


def test_every_path_that_the_dockerfile_copies_exists_and_reaches_the_build():
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copied = re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    for path in {path for line in copied for path in line.split()}:
        assert (ROOT / path).exists() or path == "README.md", path
        assert path in sent, path


def test_every_option_of_trieton_that_the_texts_show_exists():
    texts = [(ROOT / name).read_text() for name in ("docker-compose.yml", "deploy/README.md")]
    commands = [
        re.sub(r"\\\n#?", " ", match)
        for text in texts
        for match in re.findall(r"--entrypoint trieton builder ((?:[^`\n]|\\\n)+)", text)
    ]
    assert len(commands) >= 3, commands
    for command in commands:
        name, *words = command.split()
        shown = subprocess.run(
            [sys.executable, "-m", "trieton_builder", name, "--help"], capture_output=True, text=True, timeout=60
        ).stdout
        for option in (word for word in words if word.startswith("--")):
            assert option in shown, command


PROBE_ALONE = """
import importlib.abc, sys

REFUSED = "polars duckdb pyarrow faiss onnx onnxscript transformers fsspec jinja2 matplotlib pytriton".split()

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
from trieton_builder.__main__ import main
sys.argv = ["trieton", "probe", "--help"]
main()
"""


def test_the_probe_needs_nothing_that_the_server_image_does_not_install():
    done = subprocess.run([sys.executable, "-c", PROBE_ALONE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--url" in done.stdout
    assert "--timeout" in done.stdout
    assert "--live" in done.stdout
