"""`trieton refresh`: new named sets, everything else as it is."""

from dataclasses import asdict
from pathlib import Path

import typer

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, err, out, print_json


@app.command()
@clean_errors
def refresh(
    bundle: Path = typer.Argument(..., help="The bundle to start from, e.g. a published version directory."),
    sets: Path = typer.Option(..., help="A table of named sets: item ids beside boolean columns or lists."),
    to: Path = typer.Option(..., "--out", "-o", help="Directory of the new bundle; must not exist."),
    keep: bool = typer.Option(False, "--keep", help="Keep the old bundle's sets that the table does not name."),
    id_column: str = typer.Option("item_id", help="Name of the table's column of item ids."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Make a new bundle with new named sets and the same trie, items and retriever (hard links where possible)."""
    from trieton_builder.bundle.refresh import refresh as make

    with err.status("refreshing ..."):
        made = make(bundle, sets, to, keep=keep, id_column=id_column)
    if as_json:
        print_json(asdict(made))
        return
    taken = f"{made.linked_bytes / 1e6:,.1f} MB linked, {made.copied_bytes / 1e6:,.1f} MB copied"
    out.print(f"{to}: bundle {made.bundle_id}, {len(made.sets)} sets, {taken}")
    if made.num_unknown:
        out.print(f"{made.num_unknown:,} of {made.num_rows:,} rows name items that this version does not have: ignored")
    if made.num_missing:
        out.print(f"{made.num_missing:,} items of this version have no row: they are in none of the table's sets")
