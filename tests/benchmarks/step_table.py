"""The table and the plot of `bench_step.py`; plain text where rich is not installed."""

from itertools import groupby
from pathlib import Path
from typing import Any


def _cells(row: Any) -> tuple[str, str, str, str, str]:
    levels = " ".join(f"{seconds * 1e6:.0f}" for seconds in row.levels)
    touched = "" if row.megabytes is None else f"{row.megabytes:.2f}"
    return row.name, "yes" if row.exact else "no", f"{row.total * 1e3:.3f}", levels, touched


def show(rows: list[Any], figures: list[tuple[str, str, str]], title: str) -> None:
    heads = ("", "exact", "search ms", "levels us", "MB a step")
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        for section, group in groupby(rows, key=lambda row: row.section):
            print(f"\n{section}   ({', '.join(heads[1:])})")
            for row in group:
                print("  " + " | ".join(_cells(row)))
        for figure in figures:
            print("  " + " | ".join(figure))
        return
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="left" if not head else "right", overflow="fold")
    for section, group in groupby(rows, key=lambda row: row.section):
        table.add_section()
        table.add_row(f"[bold]{section}")
        for row in group:
            table.add_row(*_cells(row))
    table.add_section()
    table.add_row("[bold]figure", "", "[bold]measured", "[bold]goal")
    for name, goal, measured in figures:
        table.add_row(name, "", measured, goal)
    Console(width=150).print(table)


def plot(rows: list[Any], path: Path) -> None:
    """Bars of the whole search, and its growth with the catalogue."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    main = [row for row in rows if "V=2048" in row.section]
    growth = [row for row in main if row.section.startswith("ours") and "," not in row.name]
    bars = [row for row in main if not row.section.startswith("ours")] + growth[-1:]
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5), width_ratios=(2, 1))
    bars.sort(key=lambda row: row.total)
    names = [f"ours, {row.name}" if row in growth else row.name for row in bars]
    colours = ["tab:orange" if row in growth else "tab:gray" for row in bars]
    left.barh(names, [row.total * 1e3 for row in bars], color=colours)
    left.set_xscale("log")
    left.invert_yaxis()
    left.set_xlabel("milliseconds for a whole search without a model")
    right.plot([float(row.name[2:]) for row in growth], [row.total * 1e3 for row in growth], "o-", color="tab:orange")
    right.set_xscale("log")
    right.set_ylim(0, 1.1e3 * max(row.total for row in growth))
    right.set_xlabel("items")
    right.set_ylabel("milliseconds")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
