"""The `trieton` command: one module per group of subcommands, imported only when its command runs."""

import typer

app = typer.Typer(
    name="trieton",
    help="Generative retrieval on NVIDIA Triton Inference Server, held to a catalogue by an exact constraint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

from trieton_builder.cli import doctor  # noqa: E402, F401
from trieton_builder.cli import refresh  # noqa: E402, F401
from trieton_builder.cli import query  # noqa: E402, F401
from trieton_builder.cli import probe  # noqa: E402, F401
from trieton_builder.cli import demo  # noqa: E402, F401
from trieton_builder.cli import rollout  # noqa: E402, F401
from trieton_builder.cli import serve  # noqa: E402, F401
from trieton_builder.cli import export  # noqa: E402, F401
