"""Every command that a README prints: programs, options, targets, profiles and files are there.

Those of README.md that need only the demo run in test_readme.py, the clients' examples in test_client_examples.py, the
load test in test_loadtest.py, serve.sh and sync.py in test_deploy_server.py; here is what can be read without running.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from trieton_builder.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "builder/PROMPT.md",
        "clients/README.md",
        "loadtest/README.md",
        "deploy/README.md",
        "deploy/SECURITY.md",
        "builder/trieton_builder/rollout/README.md",
    )
]


def printed() -> list[str]:
    """Every line of a code block and every piece of code in the text of all pages, without comments and .venv/bin/."""
    found = []
    for page in PAGES:
        text = page.read_text()
        found += [line for block in re.findall(r"(?s)```(?:sh)?\n(.*?)```", text) for line in block.splitlines()]
        found += re.findall(r"(?m)^    (\S.*)$", text)
        found += [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", re.sub(r"(?s)```.*?```", "", text))]
    return [re.sub(r"\s+#.*| &$", "", command).replace(".venv/bin/", "") for command in found]


def beginning(*starts: str) -> list[list[str]]:
    return [shlex.split(command) for command in printed() if command.startswith(starts)]


def help_of(*command: str | Path) -> str:
    done = subprocess.run([sys.executable, *command, "--help"], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def long_options(words: list[str]) -> list[str]:
    return [word.split("=")[0] for word in words if word.startswith("--")]


def test_every_command_of_trieton_exists_with_its_options():
    commands = beginning("trieton ")
    inside_compose = [words[words.index("builder") :] for words in beginning("docker compose") if "builder" in words]
    commands += inside_compose
    assert len(commands) > 25
    for words in commands:
        command: Any = typer.main.get_command(app)
        rest = words[1:]
        while hasattr(command, "commands") and rest:
            name = rest.pop(0).rstrip(",")
            assert name in command.commands, words
            command = command.commands[name]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert set(long_options(rest)) <= known, words


def test_every_target_of_make_exists():
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    named = {words[1] for words in beginning("make ")}
    assert {"demo", "test", "loadtest", "bench-constraints"} <= named
    assert named <= targets


def test_every_script_exists_with_its_options():
    scripts = beginning("python loadtest", "python deploy", "python tests", "python builder")
    assert len(scripts) >= 4
    for script in {words[1] for words in scripts}:
        text = help_of(ROOT / script)
        for words in scripts:
            if words[1] == script:
                assert all(option in text for option in long_options(words)), words
    runs = help_of(ROOT / "loadtest" / "run.py")
    rows = [
        shlex.split(options)
        for options in re.findall(r"(?m)^\| `(--[^`]+)` \|", (ROOT / "loadtest/README.md").read_text())
    ]
    assert len(rows) == 6
    assert all(option in runs for words in rows for option in long_options(words))


def test_every_option_of_locust_exists():
    # Locust leaves --expect-workers out of its help; run.py uses it, and runs in test_loadtest.py.
    text = help_of("-m", "locust", "-f", ROOT / "loadtest" / "locustfile.py") + (ROOT / "loadtest/run.py").read_text()
    commands = beginning("locust ")
    assert len(commands) == 2
    for words in commands:
        assert all(option in text for option in long_options(words)), words


def test_every_command_of_the_synchroniser_exists():
    text = help_of(ROOT / "deploy" / "sync.py")
    commands = beginning("trieton-sync ")
    assert len(commands) >= 3
    for words in commands:
        assert words[1] in text, words


def test_compose_has_the_profiles_and_services_that_are_named():
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    profiles = {profile for service in services.values() for profile in service["profiles"]}
    commands = beginning("docker compose")
    assert len(commands) >= 5
    for words in commands:
        assert {words[place + 1] for place, word in enumerate(words) if word == "--profile"} <= profiles, words
        verb = next(word for word in words if word in ("up", "run", "restart"))
        last = words[words.index(verb) + 1 :]
        service = "builder" if verb == "run" else next((word for word in last if not word.startswith("-")), "server")
        assert service in services, words


def test_the_chart_takes_what_helm_is_told():
    (words,) = beginning("helm install")
    assert (ROOT / words[3] / "Chart.yaml").is_file()
    key, _, value = words[words.index("--set") + 1].partition("=")
    values = yaml.safe_load((ROOT / words[3] / "values.yaml").read_text())
    for part in key.split("."):
        values = values[part]
    assert values == ""  # required; test_deploy_helm.py renders the chart with this very value
    assert value == "s3://bucket/trieton"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_inside_the_project_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target
