"""The page of `trieton explain`: a picture of the trie around the answer, a table per level, the answer."""

from dataclasses import dataclass
from typing import Any

from trieton_builder.report.explain import Beam, Codes, Explanation, LevelTrace, Removed

ROW, STEP, LEFT, TOP, BOTTOM = 24, 150, 60, 44, 48  # pixels: between nodes, levels, and around them
CHARACTER = 6.6  # the widest of an 11 pixel font of digits
SHOWN_IDS = 20


@dataclass(frozen=True)
class Node:
    """A prefix in the picture.

    Attributes:
        x, y: its circle. Its label begins at `label_x` and ends before `label_end`, where edges to its children begin.
        parent: place among the nodes of the column before; the root is column 0.
        kind: "answer" on the way to one, "kept" in the beam, or "removed" by the constraint.
    """

    codes: Codes
    score: float
    label: str
    x: float
    y: float
    label_x: float
    label_end: float
    parent: int
    kind: str
    title: str


def picture(explanation: Explanation, *, beams: int = 12, removed: int = 3) -> dict[str, Any]:
    """The trie around the result: the first `beams` of every level and whatever leads to an answer.

    With them the best `removed` candidates of a level that the constraint took away.

    Returns:
        columns: `Node`s, the root and then one column per level; children of one node by descending score.
        notes: per level two lines that count what is drawn and what is not.
        width and height of the drawing.
    """
    results = {tuple(codes) for codes in explanation.answer.codes.tolist()}
    chosen = _chosen(explanation, results, beams)
    shown: list[Beam | Removed] = [beam for kept in chosen for beam in kept]
    shown += [one for trace in explanation.levels for one in trace.removed]
    wide = 8 + CHARACTER * max((len(_label(entry)) for entry in shown), default=0) + 6
    step = max(STEP, wide + 30)
    count = max((len(kept) + removed for kept in chosen), default=1)
    height = TOP + ROW * (count + 1) + BOTTOM
    middle = (TOP + height - BOTTOM) / 2
    title = f"start: a prompt of {len(explanation.prompt)} tokens"
    columns = [[Node((), 0.0, "start", 8, middle, 16, LEFT - 6, -1, "answer", title)]]
    notes = []
    for trace, kept in zip(explanation.levels, chosen, strict=True):
        above = {node.codes: place for place, node in enumerate(columns[-1]) if node.kind != "removed"}
        gone = [one for one in trace.removed if one.codes[:-1] in above][:removed]
        entries: list[Beam | Removed] = [*kept, *gone]
        entries.sort(key=lambda entry: (above[entry.codes[:-1]], -entry.score))
        gap = (height - TOP - BOTTOM) / (len(entries) + 1)
        x = LEFT + step * (trace.level + 0.25)
        columns.append(
            [
                _node(entry, x, TOP + gap * (place + 1), wide, above[entry.codes[:-1]], results)
                for place, entry in enumerate(entries)
            ]
        )
        notes.append((x, *_notes(trace, len(kept), len(gone))))
    return {"columns": columns, "notes": notes, "width": LEFT + step * (len(chosen) + 0.25), "height": height}


def _chosen(explanation: Explanation, results: set[Codes], beams: int) -> list[list[Beam]]:
    """The beams that are drawn, per level."""
    chosen: list[list[Beam]] = []
    for trace in explanation.levels:
        depth = trace.level + 1
        chosen.append(
            [b for place, b in enumerate(trace.kept) if place < beams or any(r[:depth] == b.codes for r in results)]
        )
    for level in range(len(chosen) - 1, 0, -1):  # every node needs the one that it hangs on
        above = {beam.codes for beam in chosen[level - 1]}
        needed = {beam.codes[:-1] for beam in chosen[level]} - above
        chosen[level - 1] += [beam for beam in explanation.levels[level - 1].kept if beam.codes in needed]
    return chosen


def _node(entry: Beam | Removed, x: float, y: float, wide: float, parent: int, results: set[Codes]) -> Node:
    depth = len(entry.codes)
    title = f"{' '.join(_code(code) for code in entry.codes)}: {entry.score:.4f}"
    if isinstance(entry, Removed):
        kind, title = "removed", f"{title}, taken away by {entry.by}"
    else:
        kind = "answer" if any(r[:depth] == entry.codes for r in results) else "kept"
    return Node(entry.codes, entry.score, _label(entry), x, y, x + 8, x + wide, parent, kind, title)


def _notes(trace: LevelTrace, kept: int, gone: int) -> tuple[str, str]:
    beams = f"{kept} of {len(trace.kept)} beams drawn"
    return beams, f"{gone} of {trace.num_removed} taken away" if trace.num_removed else ""


def _label(entry: Beam | Removed) -> str:
    return f"{_code(entry.codes[-1])} {entry.score:.2f}"


def _code(code: int) -> str:
    return "end" if code < 0 else str(code)


def shown_ids(ids: list) -> str:
    """The first ids of a list, and how many more there are."""
    more = f", and {len(ids) - SHOWN_IDS:,} more" if len(ids) > SHOWN_IDS else ""
    return (", ".join(str(item) for item in ids[:SHOWN_IDS]) or "nothing") + more


def render_html(explanation: Explanation, history: list) -> str:
    """One page without outside parts."""
    import jinja2

    loader = jinja2.PackageLoader("trieton_builder.report", "")
    template = jinja2.Environment(loader=loader, autoescape=True).get_template("explain.html.j2")
    answer = explanation.answer
    rows = list(zip(answer.item_ids.tolist(), answer.scores.tolist(), answer.codes.tolist(), strict=True))
    return template.render(
        e=explanation, history=history, picture=picture(explanation), rows=rows, shown_ids=shown_ids, code=_code
    )
