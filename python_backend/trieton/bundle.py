"""A bundle: the immutable content of one model version directory, read and verified.

    model.py              a few lines that import `trieton.serving`
    manifest.json         what the bundle is, and sha256 and size of every other file
    retriever/            the exported retriever, see `trieton.retriever`
    index.safetensors     the trie
    catalog.safetensors   item ids by leaf
    sets.safetensors      named sets

The bundle id is a digest of the manifest, and so of everything in the bundle: bundles with one id are the same.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trieton.index.static_index import StaticIndex
from trieton.retriever.session import Retriever, RetrieverSpec

FORMAT = "trieton-bundle"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
RETRIEVER = "retriever"
BYTECODE = "__pycache__"
INDEX_FILES = ("index.safetensors", "catalog.safetensors", "sets.safetensors")  # trie, items, named sets

_FOLDER = "a folder"
_KINDS = {
    stat.S_ISDIR: _FOLDER,
    stat.S_ISLNK: "a link",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
}


class BundleError(ValueError):
    """A version directory that must not be served: incomplete, altered, or with parts that do not fit each other."""


@dataclass(frozen=True)
class Bundle:
    """An opened bundle.

    Attributes:
        path: the version directory.
        manifest: the parsed manifest.
        index: the mapped index with item table and named sets.
    """

    path: Path
    manifest: Mapping[str, Any]
    index: StaticIndex

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True, device: str = "cpu") -> "Bundle":
        """Read a bundle and refuse one that is damaged or does not fit together.

        Args:
            verify: compare the sha256 of every file with the manifest, one pass over all files.
            device: where the index will be searched, see `StaticIndex.load`.

        Raises:
            BundleError: names the file and what is wrong.
        """
        path = Path(path)
        manifest = read_manifest(path)
        _check_files(path, manifest["files"], verify=verify)
        try:
            # The manifest's checksums cover these files; hashing them a second time would double the start-up.
            index = StaticIndex.load([path / name for name in INDEX_FILES], device, verify=False)
            spec = RetrieverSpec.load(path / RETRIEVER)
        except (ValueError, OSError) as error:
            raise BundleError(f"{path}: {error}") from None
        check_fit(index, spec)
        return cls(path, manifest, index)

    @property
    def bundle_id(self) -> str:
        return self.manifest["bundle_id"]

    def load_retriever(self, *, threads: int | None = None) -> Retriever:
        """Start the exported retriever's engine where the index is; `threads` per operator, None takes one."""
        return Retriever.open(self.path / RETRIEVER, threads=threads, device=self.index.device.split(":")[0])


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a version directory, checked against its own id. Raises BundleError."""
    file = path / MANIFEST
    try:
        if _kind(file.lstat().st_mode):  # to read a pipe would wait for ever
            raise BundleError(f"{file}: {_kind(file.lstat().st_mode)}; expected a plain file")
        manifest = json.loads(file.read_text())
        found, version, claimed = manifest["format"], manifest["format_version"], manifest["bundle_id"]
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(f"{file}: missing; expected a bundle, as `trieton build` writes it") from None
    except BundleError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{file}: not readable ({type(error).__name__}: {error})") from None
    if found != FORMAT:
        raise BundleError(f"{file}: expected format {FORMAT!r}, got {found!r}")
    if version > FORMAT_VERSION:
        raise BundleError(
            f"{file}: format version {version}, this release reads up to {FORMAT_VERSION}; upgrade trieton"
        )
    if claimed != compute_bundle_id(manifest):
        raise BundleError(f"{file}: content gives the id {compute_bundle_id(manifest)}, it says {claimed}: altered")
    return manifest


def compute_bundle_id(manifest: Mapping[str, Any]) -> str:
    """The id that belongs to a manifest: 16 hex digits over all of it but the id itself."""
    content = {key: value for key, value in manifest.items() if key != "bundle_id"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def describe_file(path: Path) -> dict[str, Any]:
    """`{"sha256": hex, "size": bytes}` of one file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
        return {"sha256": digest.hexdigest(), "size": file.tell()}


def check_fit(index: StaticIndex, spec: RetrieverSpec) -> None:
    """Refuse an index whose levels or codes are not the retriever's. Raises BundleError."""
    theirs = tuple(spec.token_map.sizes)
    if index.codebook_sizes != theirs:
        raise BundleError(f"index has codebook sizes {list(index.codebook_sizes)}, the retriever's are {list(theirs)}")
    if index.has_end and spec.end_token is None:
        raise BundleError("index has semantic IDs of different lengths, but the retriever declares no end token")


def list_files(folder: Path) -> dict[str, int]:
    """{name: bytes} of every file of a bundle, names with "/". Bytecode that an interpreter left is no part of it.

    Raises:
        BundleError: something is neither a plain file nor a folder; what a link points to may change, and a pipe or a
            socket cannot be copied.
    """
    files, folders = {}, [folder]
    while folders:
        for entry in os.scandir(folders.pop()):
            mode = entry.stat(follow_symlinks=False).st_mode
            kind = _kind(mode)
            if kind and kind != _FOLDER:
                raise BundleError(f"{entry.path}: {kind}; expected plain files and folders in a bundle")
            if kind != _FOLDER:
                files[os.path.relpath(entry.path, folder)] = entry.stat(follow_symlinks=False).st_size
            elif entry.name != BYTECODE:
                folders.append(Path(entry.path))
    return files


def _kind(mode: int) -> str:
    """What an entry is that is no plain file; empty for one that is."""
    return next((text for is_kind, text in _KINDS.items() if is_kind(mode)), "" if stat.S_ISREG(mode) else "a device")


def _check_files(path: Path, files: Mapping[str, Mapping[str, Any]], *, verify: bool) -> None:
    present = list_files(path)
    extra = sorted(set(present) - set(files) - {MANIFEST})
    missing = sorted(set(files) - set(present))
    if BYTECODE in missing:
        # A bundle of ours has a file of that name, because a folder would make the server start the version twice.
        raise BundleError(
            f"{path / BYTECODE}: a folder of bytecode or nothing where the bundle has a file; take the bundle anew "
            "from where it was built"
        )
    if missing or extra:
        raise BundleError(f"{path}: missing files {missing}, files that the manifest does not name {extra}")
    for name, recorded in files.items():
        if present[name] != recorded["size"]:
            raise BundleError(f"{path / name}: expected {recorded['size']} bytes, got {present[name]}")
        if verify and describe_file(path / name)["sha256"] != recorded["sha256"]:
            raise BundleError(f"{path / name}: checksum differs from the manifest: altered or damaged")
