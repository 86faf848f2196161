"""What the README promises, run as printed: the demo in one command, then its repository served and asked."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from trieton.bundle import Bundle
from trieton_builder.server.process import TritonServer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
STEPS = "8"  # of training: enough to have a model, too few for a good one

pytestmark = pytest.mark.server


def trieton(*arguments: str, timeout: float = 150, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trieton_builder", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=cwd)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's folder and what it printed."""
    workdir = tmp_path_factory.mktemp("demo")
    done = trieton("demo", "--workdir", str(workdir), "--steps", STEPS)
    assert done.returncode == 0, done.stderr
    return workdir, done.stdout


@pytest.fixture(scope="module")
def server(demo):
    """The demo's repository on the real server, as `trieton serve` starts it, on free ports."""
    with TritonServer(demo[0] / "repository") as server:
        yield server


def indented(start: str) -> list[str]:
    """Indented blocks of the README that begin with `start`, continuation lines joined."""
    blocks = re.findall(r"(?m)^    (\S.*(?:\n      .*)*)", README)
    return [block for block in blocks if block.startswith(start)]


def test_the_demo_shows_people_a_clean_swap_and_an_honest_table(demo):
    workdir, printed = demo
    assert printed.count("last watched") == 3
    assert ", 0 failed," in printed
    assert "people whose served films differ from the same search in process: 0" in printed
    assert all(row in printed for row in ("popularity", "item-kNN", "unconstrained beam", "as served"))
    assert "the server ended with exit code 0" in printed
    rolled_back = sorted(p.name for p in workdir.glob("repository/generative_retriever/*"))
    assert rolled_back == ["1", "config.pbtxt"]  # so that a restarted server begins with the version that answers


def test_the_commands_that_the_demo_ends_with_run_as_printed(demo, server):
    serve, query, explain = (shlex.split(line)[1:] for line in demo[1].splitlines()[-3:])
    assert serve == ["serve", os.path.relpath(server.repository)]
    for command in ([*query, "--url", server.grpc_url], explain):
        done = trieton(*command)
        assert done.returncode == 0, done.stderr


def test_a_second_demo_uses_the_trained_model_again(demo):
    workdir, first = demo
    before = (workdir / "checkpoint" / "model.safetensors").stat()
    again = trieton("demo", "--workdir", str(workdir), "--steps", STEPS)
    assert again.returncode == 0, again.stderr
    assert (workdir / "checkpoint" / "model.safetensors").stat() == before
    table = first[first.index("Next film of") : first.index("differ from")]
    assert table in again.stdout


@pytest.mark.parametrize("command", indented(".venv/bin/trieton query"))
def test_every_query_of_the_readme_gets_its_answer(server, command):
    done = trieton(*shlex.split(command)[1:], "--url", server.grpc_url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_python_of_the_readme_runs_and_prints_five_films(server):
    (block,) = re.findall(r"(?s)```python\n(.*?)```", README)
    done = subprocess.run(
        [sys.executable, "-c", block.replace("127.0.0.1:8001", server.grpc_url)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6


def test_the_curl_of_the_readme_gets_strict_json(server):
    (block,) = indented("curl")
    command = block.replace("127.0.0.1:8000", server.http_url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout, parse_constant=pytest.fail)
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    assert outputs["num_results"] == [5]


def test_bringing_ones_own_items_model_and_rules_works_as_printed(demo, tmp_path):
    (tmp_path / ".demo").symlink_to(demo[0])
    num_items = 200
    np.save(tmp_path / "vectors.npy", np.random.default_rng(0).standard_normal((num_items, 16), np.float32))
    stock = pl.DataFrame({"item_id": range(num_items), "in_stock": [i % 2 == 0 for i in range(num_items)]})
    stock.write_parquet(tmp_path / "sets.parquet")
    section = README[README.index("## Bring your own") : README.index("## Operate it")]
    commands = re.findall(r"(?m)^    \.venv/bin/trieton (.*)$", section)
    commands += re.findall(r"`trieton (explain .*?)`", section)
    assert len(commands) == 7
    for command in commands:
        done = trieton(*shlex.split(command), cwd=tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    bundle = Bundle.open(tmp_path / "bundle-with-new-sets")
    assert bundle.manifest["sets"] == {"in_stock": num_items // 2}
    assert (tmp_path / "index.html").stat().st_size > 1000
