"""Where a bundle comes from: a folder, or any store that fsspec knows (s3://, gs://, abfs://, sftp://, ...)."""

import json
import os
import time
from pathlib import Path
from typing import Any

import fsspec

from trieton_builder.rollout.errors import RolloutError
from trieton_builder.rollout.repository import MANIFEST, sync_folder


class Source:
    """A bundle somewhere. The server never reads it there: it is copied to the local disk and verified first.

    Args:
        address: a path, or an address with a scheme; a scheme may need its own package (s3fs, gcsfs, adlfs, ...).

    Raises:
        RolloutError: there is no bundle, or the store's package is missing or cannot reach it.
    """

    def __init__(self, address: str | os.PathLike[str]):
        self.address = os.fspath(address)
        try:
            self._store, root = fsspec.core.url_to_fs(self.address)
            self._root = root.rstrip("/")
            self._store.invalidate_cache()
            files: dict[str, Any] = self._store.find(self._root, detail=True)
        except (ImportError, ValueError) as error:
            raise RolloutError(f"{self.address}: {error}") from None
        except FileNotFoundError:
            files = {}
        # Bytecode that an interpreter left is no part of the bundle; the file of that name is.
        self._files = {
            path[len(self._root) :].lstrip("/"): int(entry["size"] or 0)
            for path, entry in sorted(files.items())
            if "/__pycache__/" not in path
        }
        if MANIFEST not in self._files:
            raise RolloutError(f"{self.address}: no {MANIFEST} there; expected a bundle, as `trieton build` writes it")
        links = [name for name, entry in files.items() if entry.get("islink")]
        if links:
            raise RolloutError(f"{links[0]}: a link; expected plain files, since what it points to may change")

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self._files.values())

    def bundle_id(self) -> str:
        """What the manifest claims; verified only after copying."""
        try:
            return str(json.loads(self._store.cat_file(f"{self._root}/{MANIFEST}"))["bundle_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise RolloutError(f"{self.address}/{MANIFEST}: not a manifest ({type(error).__name__}: {error})") from None

    def copy_to(self, target: Path) -> None:
        """Copy every file durably into the new folder `target`. Times are those of the copy.

        A file from the future would hide later versions from the server (seen), so no time is taken over.
        """
        target.mkdir(parents=True)
        for name in self._files:
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            self._store.get_file(f"{self._root}/{name}", str(place))
            with open(place, "rb") as file:
                os.fsync(file.fileno())
            now = time.time()
            if place.stat().st_mtime > now:  # a file server whose clock is ahead of ours
                os.utime(place, (now, now))
        for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
            sync_folder(folder)
