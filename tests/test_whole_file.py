"""Files appear whole or not at all, and a full disk is named by what was being written."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from rollout_help import command, one_line
from trieton_builder.files.whole_file import named, whole_file


def test_a_file_is_replaced_when_the_block_ends_and_stays_as_it_was_when_it_raises(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")

    def write_half() -> None:
        with whole_file(tmp_path / "link") as partial:
            partial.write_text("half")
            raise KeyError("then")

    with pytest.raises(KeyError, match="then"):
        write_half()
    assert (tmp_path / "real").read_text() == "old"
    with whole_file(tmp_path / "link") as partial:
        partial.write_text("new")
        assert (tmp_path / "real").read_text() == "old"
    assert (tmp_path / "real").read_text() == "new"
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_a_device_is_written_to_and_never_replaced() -> None:
    with whole_file("/dev/null") as path:
        path.write_text("gone")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"), whole_file("/dev/full") as path:
        path.write_text("never")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), ValueError("io: No space left on device (os 28)")])
def test_an_error_of_the_disk_gets_a_name_unless_it_has_one(error: Exception) -> None:
    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: 'here'"), named("here"):
        raise error
    first = OSError(errno.ENOSPC, "full", "first")
    with pytest.raises(OSError, match="first"), named("here"):
        raise first
    with pytest.raises(OSError, match="here"), named("here", hide=True):
        raise first
    with pytest.raises(ValueError, match=r"^other$"), named("here"):
        raise ValueError("other")


SIZES = "2048,2048,2048,2048"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(0)
    codes = {f"code_{level}": rng.integers(0, 2048, 20_000) for level in range(4)}
    pl.DataFrame({"item_id": np.arange(20_000), **codes}).write_parquet(folder / "items.parquet")
    np.save(folder / "vectors.npy", rng.standard_normal((20_000, 4), np.float32))
    return folder


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("build", "items.parquet", "-o", "out/index", "--codebook-sizes", SIZES), "out/index"),
        (("build", "items.parquet", "-o", "out/index", "--codebook-sizes", SIZES, "--engine", "duckdb"), "out"),
        (("build", "items.parquet", "-o", "out/bundle", "--retriever", "retriever"), "out/bundle"),
        (("semantic-ids", "vectors.npy", "-o", "out/ids.parquet", "--codebook-sizes", "4,4"), "out/ids.parquet"),
        (("inspect", "bundle", "--html", "out/page.html"), "out/page.html"),
        (("explain", "1000", "--bundle", "bundle", "--html", "out/page.html"), "out/page.html"),
        (("refresh", "bundle", "--sets", "sets.csv", "--out", "out/new"), "out/new"),
    ],
)
def test_a_full_disk_is_one_line_with_a_name_and_leaves_nothing(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_bundle: Path, arguments: tuple, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for link, target in {"retriever": tiny_bundle / "retriever", "bundle": tiny_bundle}.items():
        (tmp_path / link).symlink_to(target)
    for file in inputs.iterdir():
        (tmp_path / file.name).symlink_to(file)
    if arguments[0] == "build" and "--retriever" in arguments:
        pl.DataFrame({"item_id": [1, 2], "codes": [[1, 2, 3], [3, 2, 1]]}).write_parquet(tmp_path / "few.parquet")
        arguments = ("build", "few.parquet", *arguments[2:])
    (tmp_path / "sets.csv").write_text("item_id,even,rare\n1000,1,0\n")
    limit = 0 if arguments[0] == "refresh" else 6  # blocks of 1024 bytes
    done = command(*arguments, limit=f"ulimit -f {limit}")
    assert one_line(done) == f"trieton: {name}: File too large"
    assert os.listdir(tmp_path / "out") == []


def test_a_full_output_and_a_reader_that_has_gone_are_no_traceback(tiny_bundle: Path) -> None:
    run = [sys.executable, "-m", "trieton_builder", "inspect", str(tiny_bundle), "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "trieton: standard output: No space left on device\n")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:
        done = subprocess.run(run, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
