"""A model repository and, beside it, what the rollout must remember.

    models/                           the repository: nothing here but what the server may load
        generative_retriever/
            config.pbtxt
            6/  7/                    versions; the highest one is the current one
    models.rollout/                   same filesystem, outside the repository, because the server takes any folder that
        lock  ledger.jsonl            appears in a model for a version, and any change for a reason to load again
        intent.json                   what a publisher is doing right now; still there when it was killed
        staging/  withdrawn/  trash/
        servers/                      one file for each `trieton serve` that runs on it
        control.key  canaries.json

The highest version directory is always the one that a server loads when it starts.
"""

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trieton_builder.bundle.model_config import MODEL_NAME
from trieton_builder.bundle.protected import refuse_as_repository
from trieton_builder.files.whole_file import whole_file
from trieton_builder.rollout.disk import exclusive, sync, sync_folder
from trieton_builder.rollout.errors import RolloutError

MANIFEST = "manifest.json"


class Repository:
    """Paths and elementary moves; every move is one rename.

    Args:
        root: folder of models. It need not exist yet, its parent must.
    """

    def __init__(self, root: str | os.PathLike[str], model: str = MODEL_NAME):
        self.root = Path(root).resolve()
        self.model = model
        self.model_dir = self.root / model
        self.config = self.model_dir / "config.pbtxt"
        self.state = self.root.parent / f"{self.root.name}.rollout"
        self.staging = self.state / "staging"
        self.withdrawn = self.state / "withdrawn"
        self.trash = self.state / "trash"
        self.intent_file = self.state / "intent.json"
        self.key_file = self.state / "control.key"
        self.server_dir = self.state / "servers"
        self.canary_file = self.state / "canaries.json"

    def __str__(self) -> str:
        return str(self.root)

    # Looking

    def versions(self) -> list[int]:
        """Numbers of the version directories, ascending. Raises RolloutError on a name the server would misread."""
        if not self.model_dir.is_dir():
            return []
        names = [path.name for path in self.model_dir.iterdir() if path.is_dir() and path.name[:1].isdigit()]
        for name in names:
            if not name.isdecimal():  # the server takes `4.tmp` for version 4 (seen)
                raise RolloutError(f"{self.model_dir / name}: the server takes this for a version; move it elsewhere")
        return sorted(map(int, names))

    def current(self) -> int | None:
        """The version that a server loads when it starts: the highest."""
        return max(self.versions(), default=None)

    def path(self, version: int) -> Path:
        return self.model_dir / str(version)

    def bundle_id(self, version: int) -> str:
        """The id in the manifest of a version; its checksums were verified when it was published."""
        return read_bundle_id(self.path(version))

    def known_bundle_id(self, version: int | None, folder: Path | None = None) -> str | None:
        """`bundle_id`, or None where there is no such version or its manifest cannot be read.

        Args:
            folder: where the version lies; None is its place in the repository.
        """
        try:
            return None if version is None else read_bundle_id(folder or self.path(version))
        except RolloutError:
            return None

    def withdrawn_versions(self) -> list[int]:
        """Numbers of the versions that were taken out and not removed yet, ascending; no other folders there."""
        if not self.withdrawn.is_dir():
            return []
        return sorted(int(path.name) for path in self.withdrawn.iterdir() if path.is_dir() and path.name.isdecimal())

    def published_files(self) -> dict[str, Path]:
        """{sha256: file} of every version, by their manifests; of equal files the newest version's."""
        files: dict[str, Path] = {}
        for version in reversed(self.versions()):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                for name, recorded in json.loads((self.path(version) / MANIFEST).read_text())["files"].items():
                    files.setdefault(recorded["sha256"], self.path(version) / name)
        return files

    def require(self) -> None:
        """Raises RolloutError unless there is a repository with the model; nothing is made where there is none."""
        if not self.root.is_dir():
            raise RolloutError(f"model repository {self.root}: no such folder")
        if not self.model_dir.is_dir():
            raise RolloutError(f"model repository {self.root} has no model {self.model}: publish a bundle first")

    def is_writable(self) -> bool:
        """Whether this process may make and change what lies beside the repository."""
        return os.access(self.state if self.state.is_dir() else self.state.parent, os.W_OK)

    # Changing

    def prepare(self) -> None:
        """Make the folders, and make sure that a rename can move a version between them.

        Raises:
            RolloutError, ValueError: this is no place for a repository.
        """
        refuse_as_repository(self.root)
        if not self.root.parent.is_dir():
            raise RolloutError(f"{self.root.parent}: no such folder; a repository is made, the folder around it is not")
        for folder in (self.root, self.model_dir, self.state, self.staging, self.withdrawn, self.trash):
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise RolloutError(f"model repository {self.root}: {folder} cannot be made: {error.strerror}") from None
        if os.stat(self.state).st_dev != os.stat(self.model_dir).st_dev:
            raise RolloutError(
                f"{self.state} and {self.model_dir} are on different filesystems, so a version cannot appear in one "
                "step; make the repository a subfolder of the mounted volume, as /srv/trieton/models of /srv/trieton"
            )

    def rename(self, source: Path, target: Path) -> None:
        """Move a directory in one step, and make the step durable."""
        if target.exists():
            raise RolloutError(f"{target} exists already")
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise RolloutError(f"{source} and {target} are on different filesystems; expected the same") from None
            raise
        sync_folder(source.parent)
        sync_folder(target.parent)

    def take_out(self, version: int) -> Path | None:
        """Move a version out of the repository, to `withdrawn`; None when it is not there."""
        source, target = self.path(version), self.withdrawn / str(version)
        if not source.is_dir():
            return None
        self.rename(source, target)
        return target

    def remove(self, folder: Path) -> None:
        """Remove a version for good: out of sight in one step, then file by file."""
        if not folder.is_dir():
            return
        hidden = self.trash / f"{folder.name}-{time.time_ns()}"
        self.rename(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a killed publisher left in staging and trash. Only under the lock."""
        for folder in (self.staging, self.trash):
            for path in folder.iterdir() if folder.is_dir() else ():
                shutil.rmtree(path, ignore_errors=True)

    # What is being done

    def read_intent(self) -> dict[str, Any] | None:
        """What a publisher was about to do when it was killed, or None."""
        try:
            return json.loads(self.intent_file.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RolloutError(f"{self.intent_file}: not readable ({error}); see the ledger, then remove it") from None

    def write_intent(self, intent: dict[str, Any]) -> None:
        write_atomically(self.intent_file, json.dumps(intent))

    def clear_intent(self) -> None:
        self.intent_file.unlink(missing_ok=True)
        sync_folder(self.state)

    @contextlib.contextmanager
    def lock(self, wait: float = 0.0, note: Callable[[str], None] = lambda text: None) -> Iterator[None]:
        """Exclude every other publisher of this repository, also after a crash.

        Args:
            note: told, once, what the filesystem lacks: locks, or a way to make a rename durable.

        Raises:
            LockedError: another one still holds it after `wait` seconds; names it.
        """
        with exclusive(self.state / "lock", f"working on {self.root}", wait, note):
            if not sync_folder(self.state):
                note(
                    f"{self.state}: this filesystem cannot sync a folder: what is published is whole, but after a "
                    "power cut the last step may be gone"
                )
            yield


def read_manifest(folder: Path) -> dict[str, Any]:
    """A version directory's manifest, without the libraries that reading the bundle needs. Raises RolloutError."""
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text()))
        manifest["bundle_id"].encode()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RolloutError(f"{folder}: not a bundle ({type(error).__name__}: {error})") from None
    return manifest


def read_bundle_id(folder: Path) -> str:
    """`bundle_id` of a version directory's manifest. Raises RolloutError."""
    return read_manifest(folder)["bundle_id"]


def write_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace a small file in one durable step."""
    with (
        whole_file(path) as partial,
        os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file,
    ):
        file.write(text)
        file.flush()
        sync(file.fileno())
    sync_folder(path.parent)
