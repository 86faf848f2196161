"""The command line as people and scripts meet it: widths, lines of JSON, advice."""

import importlib.metadata
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from rollout_help import command_here, one_line
from trieton_builder.console import PlainConsole
from trieton_builder.rollout import publish

TRIETON = (sys.executable, "-m", "trieton_builder")


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


ODD_IDS = ("a[red]x", "b[/x]", ":eyes:", "[link=http://x]y", "back\\[slash]")


@pytest.mark.case("W12")
def test_ids_sets_and_paths_are_printed_as_they_are_by_every_command(tiny_retriever_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    rows = [f"{item},{n},{n},{n},{n % 2 == 0},true" for n, item in enumerate(ODD_IDS)]
    Path("items.csv").write_text("\n".join(["item_id,code_0,code_1,code_2,[sale],[/b]", *rows, ""]))
    sets = ("--set", "[sale]", "--set", "[/b]")

    def said(*arguments: object) -> str:
        done = command_here(*arguments)
        assert done.returncode == 0, (arguments, done)
        return done.stdout + done.stderr

    build = ("build", "items.csv", "--text-ids", "--retriever", tiny_retriever_dir, "--out", "e[bold]x")
    assert "e[bold]x: 5 items" in said(*build, *sets)
    shown = said("inspect", "e[bold]x", "--html", "p[i].html")
    assert "[sale]" in shown
    assert "wrote p[i].html" in shown
    shown = said("explain", "b[/x]", "--bundle", "e[bold]x", "-c", '"[sale]" or "[/b]"', "-b", "20")
    assert all(item in shown for item in ODD_IDS)
    assert 'constraint "[sale]" or "[/b]"' in shown
    table = "\n".join(["item_id,[/new]", *(f"{item},true" for item in ODD_IDS), ""])
    Path("sets.csv").write_text(table)
    assert "f[u]: bundle" in said("refresh", "e[bold]x", "--sets", "sets.csv", "--out", "f[u]")
    said("publish", "e[bold]x", "m[s]", "--triton", "none", "--no-preflight")
    assert "current" in said("versions", "m[s]")
    assert "no[x]" in one_line(command_here("publish", "no[x]", "m[s]", "--triton", "none"))
    for bad in (("build", "no[/x].csv", "--out", "y", "--codebook-sizes", "2"), ("inspect", "no[/x]")):
        assert "no[/x]" in one_line(command_here(*bad))


def test_a_console_reads_no_markup_anywhere_and_shows_control_characters() -> None:
    console = PlainConsole(file=io.StringIO(), width=60)
    table = Table("[red]head", title="[/t]")
    table.add_row("b[/x]\x1b[31m")
    console.print(table)
    console.print("a[red]x", Text("[b]", "bold"), "/a/long/path" * 20)
    with console.status("spin [/x]"):
        pass
    text = console.file.getvalue()
    assert all(part in text for part in ("[red]head", "[/t]", "b[/x]\\x1b[31m", "a[red]x [b]"))
    assert "\x1b" not in text
    assert "/a/long/path" * 20 in text, "a path is not broken in two"


@pytest.mark.server
@pytest.mark.case("W45")
def test_serve_prints_its_json_at_once_and_lives_on_when_nobody_reads(tiny_bundle: Path, tmp_path: Path) -> None:
    publish(tiny_bundle, tmp_path / "models", servers=[], preflight=False)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    options = ("--", "--grpc-keepalive-time=7000")
    run = [*TRIETON, "serve", str(tmp_path / "models"), *ports, "--json", *options]
    with subprocess.Popen(run, stdout=subprocess.PIPE, env=environment) as serving:
        try:
            text = ""
            while not text.endswith("}\n"):  # as soon as the server is ready: it does not end
                line = serving.stdout.readline().decode()
                assert line, text
                text += line
            serving.stdout.close()  # as `head` does
            addresses = json.loads(text)
            assert command_here("query", "1000", "--url", addresses["grpc"]).returncode == 0
            assert "--grpc-keepalive-time=7000" in Path(f"/proc/{addresses['pid']}/cmdline").read_text()
            with urllib.request.urlopen(addresses["metrics"]) as answer:
                assert b"nv_inference_request_summary_us" in answer.read(), "the dashboard shows them"
        finally:
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(60) == 0


@pytest.mark.case("W45")
@pytest.mark.parametrize("arguments", [("doctor", "--no-start", "--json"), ("doctor", "--no-start"), ("--help",)])
def test_a_reader_that_leaves_early_is_no_error_to_talk_about(arguments: tuple) -> None:
    with subprocess.Popen([*TRIETON, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert said == b""


def test_a_closed_stdout_stays_closed_to_files_and_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id,code_0\n1,0\n2,1\n")
    build = [*TRIETON, "build", "items.csv", "--out", "i", "--codebook-sizes", "2", "--json"]
    for closed in (">&-", "<&- >&- 2>&-"):
        done = subprocess.run(["bash", "-c", f'"$@" {closed}', "-", *build], cwd=tmp_path, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), closed
        assert json.loads(command_here("inspect", tmp_path / "i", "--json").stdout)["items"] == 2


@pytest.mark.parametrize("locale", [{"LC_ALL": "C", "TERM": "dumb"}, {"PYTHONIOENCODING": "ascii"}])
def test_umlauts_and_bytes_in_paths_end_no_command_whatever_the_terminal(tmp_path: Path, locale: dict) -> None:
    name = os.fsdecode("größe-".encode() + b"\xff")
    (tmp_path / "items.csv").write_text("item_id,code_0\n1,0\n2,1\n")
    environment = {**os.environ, **locale, "NO_COLOR": "1", "COLUMNS": "40"}
    run = [*TRIETON, "build", "items.csv", "--out", os.fsencode(name), "--codebook-sizes", "2", "--overwrite"][:-1]
    for json_too in ((), ("--json",)):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        done = subprocess.run([*run, *json_too], cwd=tmp_path, capture_output=True, env=environment)
        assert (done.returncode, done.stderr) == (0, b""), done
        if json_too:
            assert json.loads(done.stdout)["path"] == name
    assert (tmp_path / name).is_file()


def test_a_table_of_40_columns_cuts_no_item_id(tiny_retriever_dir, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    ids = ["a-long-item-id-" + letter * 40 for letter in "xy"]
    rows = [f"{item},{n},{n},{n}" for n, item in enumerate(ids)]
    (tmp_path / "items.csv").write_text("\n".join(["item_id,code_0,code_1,code_2", *rows, ""]))
    bundle = tmp_path / "bundle"
    command_here("build", tmp_path / "items.csv", "--text-ids", "--retriever", tiny_retriever_dir, "--out", bundle)
    shown = command_here("explain", ids[0], "--bundle", bundle).stdout
    assert "…" not in shown
    answer = [line.split("│")[2].strip() for line in shown.splitlines() if line.count("│") == 5]
    assert sorted("".join(answer).split("a-long-item-id-")[1:]) == ["x" * 40, "y" * 40]
