"""What the tests of the rollout share: altered bundles, small repositories, the command line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from trieton.bundle import compute_bundle_id, describe_file
from trieton_builder.bundle.model_config import MODEL_NAME, render_config
from typer.testing import CliRunner


def small_repository(root: Path) -> Path:
    """A repository whose model takes small batches: every load searches once in each shape, and tests load often."""
    (root / MODEL_NAME).mkdir(parents=True)
    (root / MODEL_NAME / "config.pbtxt").write_text(render_config(max_batch_size=4))
    return root


def id_of(folder: Path) -> str:
    return json.loads((folder / "manifest.json").read_text())["bundle_id"]


def altered(bundle: Path, target: Path, **files: str) -> Path:
    """A copy of a bundle with other texts in some files, and a manifest that vouches for them."""
    shutil.copytree(bundle, target)
    manifest = json.loads((target / "manifest.json").read_text())
    for name, text in files.items():
        name = name.replace("__", "/").replace("_dot_", ".")
        (target / name).write_text(text)
        manifest["files"][name] = describe_file(target / name)
    manifest["bundle_id"] = compute_bundle_id(manifest)
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target


def command(*arguments: object, limit: str = "", **environment: str) -> subprocess.CompletedProcess:
    run = [sys.executable, "-m", "trieton_builder", *map(str, arguments)]
    if limit:
        run = ["bash", "-c", f'{limit}; exec "$@"', "-", *run]
    return subprocess.run(run, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def command_here(*arguments: object) -> subprocess.CompletedProcess:
    """The same within this process, for commands that end at once."""
    from trieton_builder.cli import app

    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def one_line(done: subprocess.CompletedProcess) -> str:
    """The one line of an error, below the lines of the steps that went well."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("✓", "✗"))]
    assert done.returncode == 1, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("trieton: ")
    return lines[0]
