"""`trieton explain`: why a search gave what it gave."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trieton_builder.cli import app
from trieton_builder.cli.common import CONSTRAINT_HELP, clean_errors, err, out
from trieton_builder.cli.query import item_ids

if TYPE_CHECKING:
    from trieton_builder.report.explain import Explanation

SHOWN = 8  # beams per level in the text


@app.command()
@clean_errors
def explain(
    history: list[str] = typer.Argument(..., help="Item ids, oldest first."),
    bundle: Path = typer.Option(..., help="A bundle, e.g. a published version directory."),
    num_results: int = typer.Option(10, "--num-results", "-k", help="Items wanted."),
    beam_width: int | None = typer.Option(None, "--beam-width", "-b"),
    constraint: str | None = typer.Option(None, "--constraint", "-c", help=CONSTRAINT_HELP),
    include: str | None = typer.Option(None, help="Only these items, separated by commas."),
    exclude: str | None = typer.Option(None, help="Never these items, separated by commas."),
    html: Path | None = typer.Option(None, help="Write one HTML page with a picture of the trie around the result."),
) -> None:
    """Show per level the beams that stayed, the candidates there were and what the constraint took away."""
    from trieton.bundle import Bundle
    from trieton.search.searcher import Query, Searcher

    from trieton_builder.bundle.protected import refuse_inside
    from trieton_builder.files.whole_file import whole_file
    from trieton_builder.report.explain import explain as trace
    from trieton_builder.report.explain_page import render_html

    refuse_inside(html)
    with err.status("opening the bundle ..."):
        searcher = Searcher(Bundle.open(bundle))
    text_ids = searcher.index.catalog.is_text
    asked = item_ids(history, text_ids)
    query = Query(
        history=asked,
        num_results=num_results,
        beam_width=beam_width,
        constraint=constraint,
        include=None if include is None else item_ids(include.split(","), text_ids),
        exclude=None if exclude is None else item_ids(exclude.split(","), text_ids),
    )
    explanation = trace(searcher, query)
    _print(explanation)
    if html is not None:
        page = render_html(explanation, asked)
        with whole_file(html) as partial:
            partial.write_text(page, encoding="utf-8")
        out.print(f"\nwritten: {html}")


def _print(e: "Explanation") -> None:
    from rich.table import Column, Table
    from rich.text import Text

    from trieton_builder.report.explain_page import shown_ids

    out.print(
        f"bundle {e.bundle_id}, beam width {e.beam_width}: {e.allowed_items:,} of {e.num_items:,} items allowed, "
        f"a prompt of {len(e.prompt)} tokens"
    )
    for what, text in (("constraint", e.constraint), ("base constraint", e.base)):
        if text is not None:
            out.print(f"{what} ", Text(text, "bold"), sep="")
    for what, ids in (("include only", e.include), ("exclude", e.exclude)):
        if ids is not None:
            unknown = f" ({e.num_unknown} of them unknown)" if e.num_unknown and ids is e.include else ""
            out.print(f"{what} {len(ids):,} items: {shown_ids(ids)}{unknown}")
    if e.parts:
        table = Table("part of the constraint", "items it allows", "that it alone takes away", box=None, pad_edge=False)
        for part in e.parts:
            table.add_row(part.label, f"{part.allowed:,}", f"{part.alone:,}")
        out.print(table)
    for trace in e.levels:
        out.print(
            Text(f"\nlevel {trace.level}", "bold"),
            f": {trace.candidates} candidates: {len(trace.kept)} stayed, {trace.num_pruned} found no room"
            + (f", the constraint took away {trace.num_removed} ({trace.missed} would have stayed)" if e.parts else ""),
            sep="",
        )
        for by, count in trace.removed_by.items():
            out.print("  taken away by ", Text(by, "bold"), f": {count}", sep="")
        heads = ("stayed", "score", "taken away", "score", "by") if e.parts else ("stayed", "score")
        table = Table(*heads, box=None, pad_edge=False)
        for place in range(min(SHOWN, max(len(trace.kept), len(trace.removed)))):
            beam = trace.kept[place] if place < len(trace.kept) else None
            removed = trace.removed[place] if place < len(trace.removed) else None
            cells: tuple[str, ...] = ("", "") if beam is None else (_prefix(beam.codes), f"{beam.score:.4f}")
            if e.parts:
                gone = ("", "", "") if removed is None else (_prefix(removed.codes), f"{removed.score:.4f}", removed.by)
                cells = (*cells, *gone)
            table.add_row(*cells)
        out.print(table)
        more = len(trace.kept) - SHOWN
        if more > 0:
            out.print(f"and {more} more beams that stayed")
        if trace.pruned is not None:
            out.print(f"no room for {_prefix(trace.pruned[0])} ({trace.pruned[1]:.4f}) and what scored less")
    proven = "the proven top" if e.answer.certified else "the best of the beam"
    table = Table(
        "#", Column("item", overflow="fold"), "score", "semantic ID", title=f"answer: {proven}", title_justify="left"
    )
    rows = zip(e.answer.item_ids.tolist(), e.answer.scores.tolist(), e.answer.codes.tolist(), strict=True)
    for rank, (item, score, codes) in enumerate(rows, 1):
        table.add_row(str(rank), str(item), f"{score:.4f}", _prefix(codes))
    out.print(table)


def _prefix(codes: Any) -> str:
    return " ".join(str(code) for code in codes if code >= 0)
