"""The command line as people and scripts meet it: widths, lines of JSON, advice."""

import importlib.metadata
import json
import socket
from pathlib import Path

import pytest
from rollout_help import command_here, one_line
from trieton_builder.rollout import publish


def test_the_version_is_the_distributions() -> None:
    done = command_here("--version")
    assert (done.returncode, done.stdout) == (0, f"trieton {importlib.metadata.version('trieton')}\n")


@pytest.mark.server
def test_watching_as_json_is_one_line_per_answer(served) -> None:
    asked = ("query", "1000", "--url", served.grpc_url, "--json", "--watch", "0", "--times", "3")
    answers = [json.loads(line) for line in command_here(*asked).stdout.splitlines()]
    assert len(answers) == 3
    assert len({tuple(answer["item_ids"]) for answer in answers}) == 1
    once = command_here(*asked[:-4])
    assert json.loads(once.stdout)["item_ids"] == answers[0]["item_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--watch", "-1"), "'--watch'"),
        (("--watch", "inf"), "'--watch'"),
        (("--watch", "1", "--times", "0"), "'--times'"),
        (("--timeout", "0"), "'--timeout'"),
    ],
)
def test_a_number_out_of_range_is_refused_before_anything_is_asked(arguments: tuple, message: str) -> None:
    done = command_here("query", "1000", "--url", "127.0.0.1:1", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert one_line(command_here("query", "1000", "--times", "2")) == "trieton: --times: goes with --watch"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_probe_advises_by_what_is_wrong(protocol: str) -> None:
    with socket.socket() as held:  # bound and not listening: whoever connects is refused
        held.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{held.getsockname()[1]}"
        said = one_line(command_here("probe", "--url", url, "--protocol", protocol))
        assert said.endswith("; no server listens there: trieton serve REPOSITORY starts one, --url names another")
        assert "revive" not in said
        held.listen()
        said = one_line(command_here("probe", "--url", url, "--protocol", protocol, "--timeout", "0.3"))
        assert said.endswith(f"restart the server, or: trieton probe --url {url} --revive REPOSITORY")


@pytest.mark.server
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_is_described_as_tables_and_as_json(served, protocol: str) -> None:
    url = served.grpc_url if protocol == "grpc" else served.http_url
    done = command_here("describe", url, "-p", protocol)
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines()]
    for pair in (["num_items", "300"], ["even", "150"], ["none_at_all", "0"], ["item_id_type", "int64"]):
        assert pair in lines
    assert any(line[:1] == ["strict"] for line in lines)
    described = json.loads(command_here("describe", url, "-p", protocol, "--json").stdout)
    assert described["sets"]["even"] == 150
    assert described["limits"]["num_results"] == {"default": 10, "max": 100}
    assert "nobody" in one_line(command_here("describe", url, "-p", protocol, "--model", "nobody"))


@pytest.mark.server
def test_a_probe_of_a_model_that_is_not_there_says_how_to_get_it(served) -> None:
    said = one_line(command_here("probe", "--url", served.grpc_url, "--model", "nobody"))
    assert said.endswith("trieton publish BUNDLE REPOSITORY loads one, --model names another")


def test_versions_fit_a_terminal_of_80_columns(tiny_bundle: Path, tmp_path: Path) -> None:
    long = "trieton publish " + "a-very-long-name/" * 12
    for _ in range(2):
        publish(tiny_bundle, tmp_path / "models", servers=[], preflight=False, command=long)
    lines = command_here("versions", tmp_path / "models").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["version", "state", "bundle", "items", "published", "(UTC)"]
    newest, oldest = (line.split() for line in lines if "300" in line)
    assert (newest[:2], oldest[:2]) == (["2", "current"], ["1", "kept"])
    assert "".join(line.strip() for line in lines).count("a-very-long-name/") == 24
