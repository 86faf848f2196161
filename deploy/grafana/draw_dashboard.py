"""Draws the dashboard's time series with the data of a running Prometheus, for where there is no Grafana.

    python deploy/grafana/draw_dashboard.py http://127.0.0.1:9090 dashboard.png --minutes 5

The panels, their order and their queries are those of make_dashboard.py, asked as Grafana would ask them.
"""

import json
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import numpy as np
import typer
from make_dashboard import ROWS, Panel, filled

STEP = 2  # seconds between two points
WINDOW = "20s"  # of rates; holds several scrapes as long as they are at most 5 s apart
SCALES = {"bytes": (2**20, "MiB"), "percentunit": (0.01, "%"), "s": (0.001, "ms"), "ms": (1, "ms")}


def ask(prometheus: str, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
    """Series of an expression: Prometheus' own JSON, a list of {"metric": labels, "values": [[time, text], ...]}."""
    query = urllib.parse.urlencode({"query": filled(expression, WINDOW), "start": begin, "end": end, "step": STEP})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{query}", timeout=30) as answer:
        return json.load(answer)["data"]["result"]


def legend(template: str, labels: dict[str, str]) -> str:
    """A Grafana legend with its labels filled in."""
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    return template


def draw(axes: Any, panel: Panel, prometheus: str, begin: float, end: float) -> None:
    """One panel. A panel without data stays empty and says so."""
    scale, unit = SCALES.get(panel.unit, (1, {"reqps": "1/s", "cps": "1/s"}.get(panel.unit, "")))
    grid = np.arange(begin, end + STEP, STEP)
    lines: list[tuple[str, np.ndarray]] = []
    for expression, template in panel.queries:
        for series in ask(prometheus, expression, begin, end):
            times, values = np.array(series["values"], float).T
            line = np.full(len(grid), np.nan)
            line[np.round((times - begin) / STEP).astype(int)] = values / scale
            lines.append((legend(template, series["metric"]), line))
    lines.sort(key=lambda line: -np.nan_to_num(line[1]).max())
    if panel.stacked and lines:
        axes.stackplot(grid - begin, [np.nan_to_num(line) for _, line in lines], labels=[name for name, _ in lines])
    else:
        for name, line in lines:
            axes.plot(grid - begin, line, label=name, linewidth=1.2)
    axes.set_title(panel.title + (f" [{unit}]" if unit else ""), fontsize=9, loc="left")
    axes.set_xlim(0, end - begin)
    top = panel.maximum / scale if panel.maximum else axes.get_ylim()[1]
    axes.set_ylim(bottom=0, top=1.2 * top)  # room for the legend
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if not lines:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="grey")
    elif any(name for name, _ in lines):
        axes.legend(fontsize=6, loc="upper left", framealpha=0.6, ncols=3)


def main(
    prometheus: Annotated[str, typer.Argument(help="its URL")],
    out: Annotated[Path, typer.Argument(help="PNG to write")],
    minutes: Annotated[float, typer.Option(help="how far back")] = 5,
) -> None:
    """Write the picture."""
    rows = [(title, [panel for panel in row if panel.kind == "timeseries"]) for title, row in ROWS]
    rows = [(title, row) for title, row in rows if row]
    end = time.time()
    figure = plt.figure(figsize=(16, 2.6 * len(rows)), layout="constrained")
    for band, (title, row) in zip(figure.subfigures(len(rows), 1, hspace=0.02), rows, strict=True):
        band.suptitle(title, fontsize=10, x=0.01, ha="left", fontweight="bold")
        widths = [panel.width for panel in row]
        for axes, panel in zip(band.subplots(1, len(row), width_ratios=widths, squeeze=False)[0], row, strict=True):
            draw(axes, panel, prometheus.rstrip("/"), end - 60 * minutes, end)
    figure.savefig(out, dpi=70)
    print(f"{out}: {sum(len(row) for _, row in rows)} panels, {minutes:g} minutes; seconds from left to right")


if __name__ == "__main__":
    typer.run(main)
