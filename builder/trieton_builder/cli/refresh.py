"""`trieton refresh`: new named sets, everything else as it is."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, err, goes_with, print_json

if TYPE_CHECKING:
    from trieton_builder.bundle.refresh import Refreshed

SHOWN_SETS = 40


@app.command()
@clean_errors
def refresh(
    bundle: Path = typer.Argument(..., help="The bundle to start from, e.g. a published version directory."),
    sets: Path = typer.Option(..., help="A table of named sets: item ids beside boolean columns or lists."),
    to: Path = typer.Option(..., "--out", "-o", help="Directory of the new bundle; must not exist."),
    keep_sets: bool = typer.Option(
        False, "--keep-sets", help="Keep the old bundle's sets that the table does not name."
    ),
    keep: bool = typer.Option(False, "--keep", hidden=True),
    id_column: str = typer.Option("item_id", help="Name of the table's column of item ids."),
    set_names: list[str] = typer.Option(
        [], help="A column of text with the names of an item's sets; repeatable. Lists need no word."
    ),
    set_separator: str | None = typer.Option(None, help="Between the names of --set-names in text; | by default."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Make a new bundle with new named sets and the same trie, items and retriever (hard links where possible).

    Prints what each set had and has, sets that disappear, and items that only one side knows.
    """
    from trieton_builder.bundle.refresh import refresh as make

    if keep:
        raise ValueError("--keep: is --keep-sets here; --keep N says elsewhere how many versions stay")
    goes_with("--set-separator", set_separator, "--set-names", set_names)
    with err.status("refreshing ..."):
        made = make(
            bundle,
            sets,
            to,
            keep_sets=keep_sets,
            id_column=id_column,
            set_names=set_names,
            set_separator=set_separator or "|",
        )
    if as_json:
        print_json(asdict(made))
        return
    taken = f"{made.linked_bytes / 1e6:,.1f} MB linked, {made.copied_bytes / 1e6:,.1f} MB copied"
    why = f" ({made.copied_because})" if made.copied_because else ""
    print(f"{to}: bundle {made.bundle_id}, {len(made.sets)} sets, {taken}{why}")
    print("\n".join([*_changes(made), *_notes(made)]))


def _changes(made: "Refreshed") -> Iterator[str]:
    """A line per set, those that disappear first, then new ones, then the others by how much they changed."""
    before, after = made.sets_before, made.sets
    gone, kept = set(made.dropped_sets), set(made.kept_sets)

    def order(name: str) -> tuple[int, float, str]:
        kind = 0 if name in gone else 1 if name not in before else 2
        return kind, -abs(before.get(name, 0) - after.get(name, 0)), name

    names = sorted({*before, *after}, key=order)
    width = max(len(name) for name in names[:SHOWN_SETS])
    for name in names[:SHOWN_SETS]:
        had = f"{before[name]:,}" if name in before else "-"
        has = f"{after[name]:,}" if name in after else "-"
        word = "gone" if name in gone else "new" if name not in before else "kept" if name in kept else ""
        yield f"  {name:{width}}  {had:>12} -> {has:<12}  {word}".rstrip()
    if len(names) > SHOWN_SETS:
        yield f"  and {len(names) - SHOWN_SETS:,} more sets; --json has all"
    if made.base_constraint is not None:
        yield f"base constraint {made.base_constraint}: {made.base_items_before:,} -> {made.base_items:,} items"


def _notes(made: "Refreshed") -> Iterator[str]:
    if made.dropped_sets:
        names = ", ".join(map(repr, made.dropped_sets[:SHOWN_SETS])) + ", ..." * (len(made.dropped_sets) > SHOWN_SETS)
        yield f"sets that disappear: {names}; a request that names one will fail, --keep-sets keeps them"
    for column in made.empty_columns:
        yield f"column {column!r}: no item of this version is in a set"
    for group in made.similar_sets[:SHOWN_SETS]:
        yield f"sets that differ only in upper and lower case: {', '.join(map(repr, group))}"
    if made.num_unknown:
        yield (
            f"{made.num_unknown:,} of {made.num_rows:,} rows name items that this version does not have: ignored "
            f"({_some(made.unknown_ids, made.num_unknown)})"
        )
    if made.num_missing:
        yield (
            f"{made.num_missing:,} items of this version have no row: they are in none of the table's sets "
            f"({_some(made.missing_ids, made.num_missing)})"
        )


def _some(ids: tuple[int | str, ...], count: int) -> str:
    return ", ".join(map(repr, ids)) + ", ..." * (count > len(ids))
