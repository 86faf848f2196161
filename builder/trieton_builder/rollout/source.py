"""Where a bundle comes from: a folder, or any store that fsspec knows (s3://, gs://, abfs://, sftp://, ...)."""

import functools
import json
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from trieton_builder.rollout.disk import sync, sync_folder
from trieton_builder.rollout.errors import RolloutError
from trieton_builder.rollout.repository import MANIFEST

# A version is started anew by touching this file, so each version has its own.
NEVER_LINKED = ("model.py",)


class Source:
    """A bundle somewhere. The server never reads it there: it is copied to the local disk and verified first.

    Args:
        address: a path, or an address with a scheme; a scheme may need its own package (s3fs, gcsfs, adlfs, ...).

    Raises:
        RolloutError: there is no bundle, or the store's package is missing or cannot reach it.
        BundleError: a folder holds something that is neither a plain file nor a folder.
    """

    def __init__(self, address: str | os.PathLike[str]):
        self.address = os.fspath(address)
        try:
            self._store, root = fsspec.core.url_to_fs(self.address)
            self._root = root.rstrip("/")
            self._store.invalidate_cache()
        except (ImportError, ValueError) as error:
            raise RolloutError(f"{self.address}: {error}") from None
        self._files = self._list()
        if MANIFEST not in self._files:
            raise RolloutError(f"{self.address}: no {MANIFEST} there; expected a bundle, as `trieton build` writes it")

    def _list(self) -> dict[str, int]:
        """{name: bytes} of every file."""
        from trieton.bundle import BYTECODE, list_files  # only here: other commands start sooner without it

        if isinstance(self._store, LocalFileSystem):
            plain = "://" not in self.address and "::" not in self.address
            folder = Path(self.address if plain else self._root)
            return dict(sorted(list_files(folder).items())) if folder.is_dir() else {}
        try:
            found: dict[str, Any] = self._store.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        except (ImportError, ValueError) as error:
            raise RolloutError(f"{self.address}: {error}") from None
        odd = [path for path, entry in found.items() if entry.get("islink") or entry.get("type") in ("link", "other")]
        if odd:
            raise RolloutError(f"{self.address}: {odd[0]}: a link or a special file; expected plain files")
        return {
            path[len(self._root) :].lstrip("/"): int(entry["size"] or 0)
            for path, entry in sorted(found.items())
            if f"/{BYTECODE}/" not in path
        }

    @functools.cached_property
    def manifest(self) -> dict[str, Any]:
        """What the bundle says of itself; verified only after copying."""
        try:
            manifest = json.loads(self._store.cat_file(f"{self._root}/{MANIFEST}"))
            manifest["bundle_id"], manifest["files"].items()
        except FileNotFoundError:
            raise self._vanished(MANIFEST) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RolloutError(f"{self.address}/{MANIFEST}: not a manifest ({type(error).__name__}: {error})") from None
        return manifest

    def bundle_id(self) -> str:
        """What the manifest claims."""
        return str(self.manifest["bundle_id"])

    def size(self, published: Collection[str] = ()) -> int:
        """Bytes of all files but those that need no copy; `published`: sha256 of files that a repository has."""
        return sum(size for name, size in self._files.items() if self._digest(name) not in published)

    def copy_to(self, target: Path, published: Mapping[str, Path] | None = None) -> int:
        """Copy every file durably into the new folder `target`. Times are those of the copy.

        A file from the future would hide later versions from the server (seen), so no time is taken over.

        Args:
            published: {sha256: file} of versions that are in the repository already. A file with the same checksum
                becomes one more name (a hard link) of that one. Files of the source are never linked: they may be
                edited in place, and published ones are not.

        Returns:
            How many files are links.
        """
        target.mkdir(parents=True)
        linked = 0
        for name in self._files:
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            there = (published or {}).get(self._digest(name))
            if there is not None and _link(there, place):
                linked += 1
                continue
            self._copy(name, place)
        for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
            sync_folder(folder)
        return linked

    def _copy(self, name: str, place: Path) -> None:
        try:
            self._store.get_file(f"{self._root}/{name}", str(place))
        except FileNotFoundError:
            raise self._vanished(name) from None
        with open(place, "rb") as file:
            sync(file.fileno())
        now = time.time()
        if place.stat().st_mtime > now:  # a file server whose clock is ahead of ours
            os.utime(place, (now, now))

    def _digest(self, name: str) -> str:
        """sha256 of a file as the manifest has it; empty for one that has to be copied."""
        recorded = self.manifest["files"].get(name)
        if name in NEVER_LINKED or not isinstance(recorded, dict):
            return ""
        return str(recorded.get("sha256", ""))

    def _vanished(self, name: str) -> RolloutError:
        return RolloutError(f"{self.address}/{name}: it was there a moment ago; the bundle was removed meanwhile")


def _link(source: Path, target: Path) -> bool:
    """Make `target` one more name of `source`; False where the filesystem does not allow it."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
