"""Which files an input consists of: a file, a folder or a pattern; every command that reads tables asks here."""

import fnmatch
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from trieton_builder.catalogue.faults import CatalogError

SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "lines"}
SUFFIXES[".ndjson"] = "lines"
PACKED = (".gz", ".gzip", ".zst", ".zstd")  # what Polars unpacks while it reads
PACKED_INSIDE = (*PACKED, ".snappy", ".lz4", ".brotli")  # Parquet is packed inside; some writers append how
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class FoundFile:
    """One file of an input.

    Attributes:
        path: where it lies.
        name: its path relative to the input, with `/`; the bare name where the input is the file itself.
        partitions: column and value of each folder `column=value` between the input and the file; None: no value.
    """

    path: Path
    name: str
    partitions: tuple[tuple[str, str | None], ...] = ()


def find_files(path: str | Path) -> list[FoundFile]:
    """Files of a path, a folder or a pattern, in order of their paths.

    A path that exists is taken as it is written, whatever characters it has; only one that does not is a pattern. In a
    folder, hidden files and folders, and those that begin with `_`, are what engines and editors leave beside the data.
    They are skipped at any depth. Everything else there has to be readable, so that no rows are lost.

    Raises:
        CatalogError: nothing there, a kind that is not read, a link to nothing, one file that is reached twice.
    """
    place = Path(path)
    if place.is_file():
        kind_of(place)
        return [FoundFile(place, place.name)]
    if place.is_dir():
        found = sorted(_walk(place))
        if not found:
            raise CatalogError(f"{path}: no {', '.join(SUFFIXES)} file in this folder (hidden ones do not count)")
        root = place
    elif os.path.lexists(place):
        raise CatalogError(f"{path}: expected a file or a folder, got {_what_is(place)}")
    else:
        root, found = _matches(str(path))
    for file in found:
        kind_of(file)
    _refuse_twice(found)
    return [FoundFile(file, file.relative_to(root).as_posix(), _partitions(file, root)) for file in found]


def kind_of(file: Path) -> str:
    """parquet, csv, lines or json, by the file's suffix, with or without that of a compression behind it."""
    name = Path(file.name.lower())
    kind = SUFFIXES.get(name.suffix)
    inner = SUFFIXES.get(Path(name.stem).suffix)
    if inner and name.suffix in (PACKED_INSIDE if inner == "parquet" else PACKED):
        kind = inner
    if kind is None:
        got = "".join(Path(file.name).suffixes[-2:]) or "no suffix"
        raise CatalogError(
            f"{file}: expected one of {', '.join(SUFFIXES)}, also with .gz or .zst behind it, got {got!r}"
        )
    return kind


def _walk(folder: Path) -> Iterator[Path]:
    """Files below `folder` that are not hidden; links are followed."""

    def fail(error: OSError) -> None:
        raise CatalogError(f"{error.filename}: not readable: {error.strerror}") from None

    seen: dict[str, Path] = {}
    for here, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        real = os.path.realpath(here)
        if real in seen:
            raise CatalogError(f"{here}: a link to {seen[real]}, which is read already")
        seen[real] = Path(here)
        folders[:] = [name for name in folders if not _hidden(name)]
        for name in names:
            file = Path(here, name)
            if _hidden(name):
                continue
            if not file.is_file():
                raise CatalogError(f"{file}: expected a file, got {_what_is(file)}")
            try:
                kind_of(file)
            except CatalogError as error:
                hint = f"; to leave it out, name the others with a pattern such as '{folder}/*.csv'"
                raise CatalogError(f"{error}{hint}") from None
            yield file


def _hidden(name: str) -> bool:
    # A partition of a column whose name begins with _ is data, as Spark has it.
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _matches(pattern: str) -> tuple[Path, list[Path]]:
    """The folder that a pattern starts from, and the files that it matches; of folders those inside."""
    parts = Path(pattern).parts
    # Folders that exist as they are written are no pattern, whatever characters they have.
    fixed = next((i for i in range(len(parts)) if not Path(*parts[: i + 1]).exists()), len(parts) - 1)
    root = Path(*parts[:fixed])
    asked = [part for part in parts[fixed:] if part.startswith(("_", "."))]  # named as such, so wanted
    found: set[Path] = set()
    for match in map(Path, glob.glob(os.path.join(glob.escape(str(root)), *parts[fixed:]), recursive=True)):
        below = match.relative_to(root).parts
        if any(_hidden(part) and not any(fnmatch.fnmatchcase(part, wanted) for wanted in asked) for part in below):
            continue
        if match.is_dir():
            found.update(_walk(match))
        elif match.is_file():
            found.add(match)
        else:
            raise CatalogError(f"{match}: expected a file, got {_what_is(match)}")
    if not found:
        raise CatalogError(f"{pattern}: no such file or folder, and as a pattern it matches no file")
    return root, sorted(found)


def _what_is(place: Path) -> str:
    if place.is_symlink() and not place.exists():
        return "a link to nothing"
    return "a pipe, socket or device; write its content to a file"


def _refuse_twice(files: list[Path]) -> None:
    seen: dict[str, Path] = {}
    for file in files:
        first = seen.setdefault(os.path.realpath(file), file)
        if first is not file:
            raise CatalogError(f"{file}: the same file as {first}; each may be read once")


def _partitions(file: Path, root: Path) -> tuple[tuple[str, str | None], ...]:
    columns: dict[str, str | None] = {}
    for part in file.relative_to(root).parts[:-1]:
        name, separator, value = part.partition("=")
        if not separator or not name:
            continue
        name = unquote(name)
        if name in columns:
            raise CatalogError(f"{file}: column {name!r}: two of its folders give it a value")
        columns[name] = None if value == NO_VALUE else unquote(value)
    return tuple(columns.items())
