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
INDEX_FILES = ("index.safetensors", "catalog.safetensors", "sets.safetensors")  # trie, items, named sets


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
        manifest = json.loads(file.read_text())
        found, version, claimed = manifest["format"], manifest["format_version"], manifest["bundle_id"]
    except FileNotFoundError:
        raise BundleError(f"{file}: missing; expected a bundle, as `trieton build` writes it") from None
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


def _check_files(path: Path, files: Mapping[str, Mapping[str, Any]], *, verify: bool) -> None:
    # Interpreters leave bytecode beside model.py; nothing else may stand in a version directory.
    present = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and p.parent.name != "__pycache__"}
    extra = sorted(present - set(files) - {MANIFEST})
    missing = sorted(set(files) - present)
    if missing or extra:
        raise BundleError(f"{path}: missing files {missing}, files that the manifest does not name {extra}")
    for name, recorded in files.items():
        size = (path / name).stat().st_size
        if size != recorded["size"]:
            raise BundleError(f"{path / name}: expected {recorded['size']} bytes, got {size}")
        if verify and describe_file(path / name)["sha256"] != recorded["sha256"]:
            raise BundleError(f"{path / name}: checksum differs from the manifest: altered or damaged")
