"""`trieton describe`: what a running server serves, by its own words."""

from typing import TYPE_CHECKING, Any

import typer

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, out, print_json
from trieton_builder.cli.query import MODEL, PROTOCOL, TIMEOUT

if TYPE_CHECKING:
    from rich.table import Table


@app.command()
@clean_errors
def describe(
    url: str = typer.Argument("127.0.0.1:8001", help="host:port of the server's gRPC (or HTTP) endpoint."),
    protocol: str = PROTOCOL,
    model: str = MODEL,
    timeout: float = TIMEOUT,
    as_json: bool = typer.Option(False, "--json", help="Print the description as JSON."),
) -> None:
    """Show what the served version says about itself: item ids, named sets, limits, retriever, prompt, parameters."""
    from trieton_client import Client

    with Client(url, protocol, model=model, timeout=timeout) as client:
        description = client.describe()
    if as_json:
        print_json(description)
        return
    out.print(_facts(description))
    for title, values, empty in (
        ("named set", description.get("sets"), "no named sets"),
        ("parameter", description.get("parameters"), "no parameters"),
    ):
        out.print(_pairs(title, values) if values else empty)


def _facts(description: dict[str, Any]) -> "Table":
    """Everything but what has a table of its own, one line per fact; also facts that this release does not know."""
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in description.items():
        if name in ("sets", "parameters"):
            continue
        if isinstance(value, dict):
            for inner, detail in value.items():
                table.add_row(f"{name}.{inner}", _text(detail))
        else:
            table.add_row(name, _text(value))
    return table


def _pairs(title: str, values: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table(title, "meaning" if title == "parameter" else "items")
    for name, value in values.items():
        table.add_row(name, _text(value))
    return table


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else str(value)
