"""The inspection of an index as one self-contained HTML page with plots."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from trieton_builder.report.inspection import IndexStats, human_bytes

_COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a")
_SHOWN_SETS = 30


def render_page(stats: IndexStats, title: str, facts: Sequence[tuple[str, str]] = ()) -> str:
    """HTML without a single reference to anything outside. The same statistics give the same text.

    Args:
        facts: names and values about the bundle and its retriever.
    """
    here = Path(__file__).parent
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(here), autoescape=True, trim_blocks=True)
    environment.filters["count"] = lambda number: f"{number:,}"
    environment.filters["size"] = human_bytes
    template = environment.get_template("inspection.html.j2")
    return template.render(title=title, stats=stats, facts=facts, plots=_plots(stats))


def _plots(stats: IndexStats) -> list[tuple[str, Markup]]:
    levels = list(range(len(stats.levels)))

    def sizes(axes: Any) -> None:
        axes.bar([x - 0.2 for x in levels], [level.states for level in stats.levels], 0.4, label="states")
        axes.bar([x + 0.2 for x in levels], [level.edges for level in stats.levels], 0.4, label="edges")
        axes.set(xlabel="level", yscale="log" if stats.leaves else "linear")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()

    def fan_outs(axes: Any) -> None:
        for name, label in (
            ("mean_fan_out", "mean"),
            ("p99_fan_out", "99th percentile"),
            ("largest_fan_out", "largest"),
        ):
            axes.plot(levels, [getattr(level, name) for level in stats.levels], marker="o", label=label)
        axes.set(xlabel="level", ylabel="children per state", yscale="log" if stats.leaves else "linear")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()

    def nbytes(axes: Any) -> None:
        parts = [(f"level {i} ({level.stored_as})", level.nbytes) for i, level in enumerate(stats.levels)]
        parts += [("item table", stats.item_bytes), ("named sets", stats.set_bytes)]
        axes.barh([name for name, _ in reversed(parts)], [size / 1e6 for _, size in reversed(parts)])
        axes.set(xlabel="MB")

    def per_leaf(axes: Any) -> None:
        axes.bar([int(size) for size in stats.items_per_leaf], list(stats.items_per_leaf.values()))
        axes.set(xlabel="items of a semantic ID", ylabel="semantic IDs", yscale="log" if stats.leaves else "linear")
        axes.xaxis.get_major_locator().set_params(integer=True)

    def sets(axes: Any) -> None:
        largest = sorted(stats.sets.items(), key=lambda entry: (entry[1], entry[0]))[-_SHOWN_SETS:]
        axes.barh([name[:40] for name, _ in largest], [size for _, size in largest])
        axes.set(xlabel="items")

    plots = [
        ("States and edges of each level", _svg(sizes)),
        ("Fan-out of each level", _svg(fan_outs)),
        ("Where the bytes are", _svg(nbytes, height=1.6 + 0.22 * len(levels))),
        ("Items per semantic ID", _svg(per_leaf)),
    ]
    if stats.sets:
        count = min(len(stats.sets), _SHOWN_SETS)
        name = "Named sets" if count == len(stats.sets) else f"The {count} largest of {len(stats.sets)} named sets"
        plots.append((name, _svg(sets, height=1.2 + 0.22 * count)))
    return plots


def _svg(draw: Callable[[Any], None], height: float = 3.2) -> Markup:
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    settings = {
        "svg.hashsalt": "trieton",  # element ids would otherwise be random
        "svg.fonttype": "none",
        "axes.prop_cycle": cycler(color=_COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(5.6, height), layout="constrained")
        draw(figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = text.getvalue()
    return Markup(svg[svg.index("<svg") :])
