"""What the person who runs the demo sees while it works: the stage at work with a bar, and how long each took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text


class Stages:
    """Runs stages one after another and keeps their seconds.

    Attributes:
        seconds: {title: seconds}, in the order in which the stages ran.
    """

    def __init__(self, console: Console):
        self.console = console
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, title: str) -> Iterator[Progress]:
        """Show `title` while the block runs; it may add bars of its own to the Progress that it is given."""
        start = time.perf_counter()
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            progress.add_task(title, total=None)
            yield progress
        self.seconds[title] = time.perf_counter() - start
        self.console.print(Text("✓", "green"), title, Text(f"{self.seconds[title]:.1f} s", "dim"))
