"""What is wrong with a catalogue, in one form: file, column, row."""

from pathlib import Path


class CatalogError(ValueError):
    """A catalogue file that cannot be used: names the file, and column and row where they are known."""


def fault(file: Path, column: str, row: int, what: str) -> CatalogError:
    """What is wrong with one row of a column."""
    return CatalogError(f"{file}: column {column!r}: row {row}: {what}")
