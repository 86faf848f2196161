"""What the tests of the rollout share: altered bundles, small repositories, the command line."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
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


def altered(bundle: Path, target: Path, *, fields: dict | None = None, **files: str) -> Path:
    """A copy of a bundle with other texts in some files, and a manifest (with other `fields`) that vouches for them."""
    shutil.copytree(bundle, target)
    manifest = {**json.loads((target / "manifest.json").read_text()), **(fields or {})}
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


@contextlib.contextmanager
def relay(url: str) -> Iterator[str]:
    """host:port of a socket that passes everything on to the server at `url`, as the port of a container does."""
    host, _, port = url.rpartition(":")
    listening = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = [listening]

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                target.sendall(chunk)
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listening.accept()
                far = socket.create_connection((host, int(port)))
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def one_line(done: subprocess.CompletedProcess) -> str:
    """The one line of an error, below the lines of the steps that went well."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("✓", "✗"))]
    assert done.returncode == 1, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("trieton: ")
    return lines[0]
