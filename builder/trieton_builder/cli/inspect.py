"""`trieton inspect`: what an index or a bundle holds, level by level."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.table import Column, Table
from rich.text import Text

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, err, out, print_json
from trieton_builder.console import PlainConsole

if TYPE_CHECKING:
    from trieton_builder.report.inspection import IndexStats


_WIDEST = 10_000  # columns of a table


@app.command("inspect")
@clean_errors
def inspect_command(
    path: Path = typer.Argument(help="An index file, a bundle's directory, or a retriever's."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
    html: Path | None = typer.Option(None, help="Also write one self-contained HTML page with plots."),
) -> None:
    """Show states, fan-out and bytes of every level, collisions and named sets; retriever and prompt of a bundle."""
    from trieton_builder.bundle.protected import refuse_inside
    from trieton_builder.report.inspection import inspect_index, open_path
    from trieton_builder.report.retriever import retriever_facts

    refuse_inside(html)
    with err.status("reading ..."):
        found = open_path(path)
        stats = None if found.index is None else inspect_index(found.index)
    facts = [*found.bundle_facts(), *(retriever_facts(found.spec) if found.spec else [])]
    remarks = found.spec.remarks() if found.spec else []
    if html is not None:
        if stats is None:
            raise ValueError("--html: goes with an index or a bundle; a retriever has nothing to plot")
        _write_page(html, stats, str(path), [*facts, *(("remark", remark) for remark in remarks)])
    if as_json:
        print_json(
            {
                **(stats.to_json() if stats else {}),
                **({"bundle": _bundle_json(found.manifest)} if found.manifest else {}),
                **({"retriever": {**found.spec.to_json(), "remarks": remarks}} if found.spec else {}),
            }
        )
        return
    if facts:
        width = max(len(name) for name, _ in facts)
        out.print("\n".join(f"{name:<{width}}  {text}" for name, text in facts), soft_wrap=True)
    for remark in remarks:
        out.print(f"remark: {remark}", soft_wrap=True)
    if stats is not None:
        _print(stats)


def _bundle_json(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: manifest.get(name) for name in ("bundle_id", "base_constraint", "expressions", "provenance")}


def _write_page(html: Path, stats: "IndexStats", title: str, facts: list[tuple[str, str]]) -> None:
    from trieton_builder.files.whole_file import whole_file
    from trieton_builder.report.inspection_page import render_page

    page = render_page(stats, title, facts)
    with whole_file(html) as partial:
        partial.write_text(page, encoding="utf-8")
    err.print(f"wrote {html}")


def _print(stats: "IndexStats") -> None:
    from trieton_builder.report.inspection import human_bytes

    _print_whole(_levels(stats))
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
            table.add_row(Text(name), f"{size:,}", f"{size / max(stats.items, 1):.1%}")
        _print_whole(table)


def _print_whole(table: Table) -> None:
    """A table as wide as it has to be: in a narrow terminal or a pipe lines are longer, and no number is cut."""
    for column in table.columns:
        column.no_wrap = True
    wide = out.options.update(max_width=_WIDEST)
    width = max(out.width, out.measure(table, options=wide).maximum)
    PlainConsole(file=out.file, width=width).print(table, crop=False)


def _levels(stats: "IndexStats") -> Table:
    from trieton_builder.report.inspection import human_bytes

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("level", "kept", "codes", "states", "edges", "fan-out", "p99", "max", "bytes"):
        table.add_column(name, justify="left" if name == "kept" else "right", no_wrap=True)
    for number, level in enumerate(stats.levels):
        table.add_row(
            str(number),
            level.stored_as,
            f"{level.codes_used:,}/{level.codebook_size:,}",
            f"{level.states:,}",
            f"{level.edges:,}",
            f"{level.mean_fan_out:.1f}",
            f"{level.p99_fan_out:,}",
            f"{level.largest_fan_out:,}",
            human_bytes(level.nbytes),
        )
    return table
