"""`trieton demo`."""

from pathlib import Path
from typing import Annotated

import typer

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors


@app.command()
@clean_errors
def demo(
    workdir: Annotated[Path, typer.Option(help="Where the model, the bundles and the repository are made.")] = Path(
        ".demo"
    ),
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; the recipe's when not given.")] = None,
) -> None:
    """Train, export, build, publish, ask, swap under traffic and roll back, on MovieLens-100k and the real server."""
    from dataclasses import replace

    from trieton_builder.console import PlainConsole
    from trieton_builder.demo.run import run_demo
    from trieton_builder.demo.train import Recipe

    run_demo(workdir, PlainConsole(), Recipe() if steps is None else replace(Recipe(), steps=steps))
