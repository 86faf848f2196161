"""`trieton inspect`: what an index or a bundle holds, level by level."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.table import Column, Table

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, err, out, print_json

if TYPE_CHECKING:
    from trieton_builder.report.inspection import IndexStats


@app.command("inspect")
@clean_errors
def inspect_command(
    path: Path = typer.Argument(help="An index file, or a bundle's directory."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
    html: Path | None = typer.Option(None, help="Also write one self-contained HTML page with plots."),
) -> None:
    """Show states, fan-out and bytes of every level, collisions and named sets."""
    from trieton_builder.bundle.protected import refuse_inside
    from trieton_builder.report.inspection import human_bytes, inspect_index, open_index

    refuse_inside(html)
    with err.status("reading ..."):
        stats = inspect_index(open_index(path))
    if html is not None:
        from trieton_builder.files.whole_file import whole_file
        from trieton_builder.report.inspection_page import render_page

        page = render_page(stats, str(path))
        with whole_file(html) as partial:
            partial.write_text(page, encoding="utf-8")
        err.print(f"wrote {html}")
    if as_json:
        print_json(stats.to_json())
        return

    out.print(_levels(stats))
    lines = [
        f"{stats.items:,} items with {'string' if stats.text_ids else 'integer'} ids on {stats.leaves:,} semantic IDs"
        + (" of different lengths" if stats.has_end else ""),
        f"{stats.bytes_per_item:.2f} bytes per item (floor {stats.floor_bytes_per_item:.2f}): "
        f"trie {human_bytes(stats.trie_bytes)}",
        f"beside it: item table {human_bytes(stats.item_bytes)}, named sets {human_bytes(stats.set_bytes)}",
        f"{stats.colliding_items:,} items share their semantic ID, up to {stats.largest_collision:,} on one",
    ]
    out.print("\n".join(lines), soft_wrap=True)
    if stats.sets:
        table = Table(Column("named set", overflow="fold"), box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("items", justify="right")
        table.add_column("share", justify="right")
        for name, size in stats.sets.items():
            table.add_row(name, f"{size:,}", f"{size / max(stats.items, 1):.1%}")
        out.print(table)


def _levels(stats: "IndexStats") -> Table:
    from trieton_builder.report.inspection import human_bytes

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("level", "kept", "codes", "states", "edges", "fan-out", "p99", "max", "bytes"):
        table.add_column(name, justify="left" if name == "kept" else "right", no_wrap=True)
    for number, level in enumerate(stats.levels):
        table.add_row(
            str(number),
            level.stored_as,
            f"{level.codes_used}/{level.codebook_size}",
            f"{level.states:,}",
            f"{level.edges:,}",
            f"{level.mean_fan_out:.1f}",
            f"{level.p99_fan_out}",
            f"{level.largest_fan_out}",
            human_bytes(level.nbytes),
        )
    return table
