"""The `trieton` command: one module per group of subcommands, imported only when its command runs."""

import importlib.metadata

import typer

app = typer.Typer(
    name="trieton",
    help="Generative retrieval on NVIDIA Triton Inference Server, held to a catalogue by an exact constraint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"trieton {importlib.metadata.version('trieton')}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


# Each module adds its commands to `app`, so it must exist before they are imported.
from trieton_builder.cli import (  # noqa: E402
    build,
    demo,
    describe,
    doctor,
    explain,
    export,
    inspect,
    probe,
    query,
    refresh,
    rollout,
    semantic_ids,
    serve,
)

__all__ = [
    "app",
    "build",
    "demo",
    "describe",
    "doctor",
    "explain",
    "export",
    "inspect",
    "probe",
    "query",
    "refresh",
    "rollout",
    "semantic_ids",
    "serve",
]
