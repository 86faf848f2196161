"""`trieton query`: ask a running server, as a person would."""

import itertools
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import typer

from trieton_builder.cli import app
from trieton_builder.cli.common import CONSTRAINT_HELP, clean_errors, goes_with, out, print_json

if TYPE_CHECKING:
    from rich.table import Table
    from trieton_client import Client, Results

URL = typer.Option("127.0.0.1:8001", "--url", "-u", help="host:port of the server's gRPC (or HTTP) endpoint.")
PROTOCOL = typer.Option("grpc", "--protocol", "-p", help="grpc or http.")
MODEL = typer.Option("generative_retriever", "--model", "-m", help="Name of the served model.")
TIMEOUT = typer.Option(10.0, "--timeout", "-t", min=0.001, help="Seconds until the call is given up.")


@app.command()
@clean_errors
def query(
    history: list[str] = typer.Argument(..., help="Item ids, oldest first."),
    url: str = URL,
    protocol: str = PROTOCOL,
    model: str = MODEL,
    num_results: int = typer.Option(10, "--num-results", "-k", help="Items wanted."),
    beam_width: int | None = typer.Option(None, "--beam-width", "-b", help="The server's default when left out."),
    constraint: str | None = typer.Option(None, "--constraint", "-c", help=CONSTRAINT_HELP),
    include: str | None = typer.Option(None, help="Only these items, separated by commas."),
    exclude: str | None = typer.Option(None, help="Never these items, separated by commas."),
    timeout: float = TIMEOUT,
    as_json: bool = typer.Option(False, "--json", help="Print the answer as JSON, one line per answer with --watch."),
    watch: float | None = typer.Option(
        None, min=0, max=86400, help="Ask again every so many seconds (at most a day), until Ctrl-C."
    ),
    times: int | None = typer.Option(None, min=1, help="With --watch: how often; for ever by default."),
) -> None:
    """Retrieve the best items for one history and show them as a table."""
    from rich.live import Live
    from trieton_client import Client

    goes_with("--times", times, "--watch", watch is not None)
    with Client(url, protocol, model=model, timeout=timeout) as client:
        text_ids = client.facts().text_ids
        arguments = {
            "history": item_ids(history, text_ids),
            "num_results": num_results,
            "beam_width": beam_width,
            "constraint": constraint,
            "include": None if include is None else item_ids(include.split(","), text_ids),
            "exclude": None if exclude is None else item_ids(exclude.split(","), text_ids),
        }
        if watch is None:
            results, milliseconds = _timed(client, arguments)
            if as_json:
                print_json(as_dict(results))
            else:
                out.print(_table(results, milliseconds))
            return
        with nullcontext() if as_json else Live(console=out, auto_refresh=False) as live:
            for turn in range(times) if times else itertools.count():
                if turn:
                    time.sleep(watch)
                results, milliseconds = _timed(client, arguments)
                if live is None:
                    print_json(as_dict(results), lines=True)
                else:
                    live.update(_table(results, milliseconds), refresh=True)


def item_ids(words: list[str], text_ids: bool) -> list[Any]:
    """Words of a command line as the catalogue's kind of item ids.

    Raises:
        ValueError: a word that is no integer where the catalogue has integers.
    """
    if text_ids:
        return list(words)
    for word in words:
        if not word.strip().lstrip("-").isdigit():
            raise ValueError(f"item ids of this model are integers, got {word!r}")
    return [int(word) for word in words]


def as_dict(results: "Results") -> dict[str, Any]:
    """An answer as plain JSON values."""
    return {
        "item_ids": results.item_ids.tolist(),
        "scores": results.scores.tolist(),
        "codes": results.codes.tolist(),
        "num_results": results.num_results,
        "num_unknown": results.num_unknown,
        "certified": results.certified,
        "bundle_id": results.bundle_id,
        "model_version": results.model_version,
    }


def _timed(client: "Client", arguments: dict[str, Any]) -> "tuple[Results, float]":
    started = time.perf_counter()
    results = client.retrieve(**arguments)
    return results, (time.perf_counter() - started) * 1e3


def _table(results: "Results", milliseconds: float) -> "Table":
    from rich.table import Table

    proven = "the proven top" if results.certified else "the best of the beam"
    unknown = f", {results.num_unknown} unknown items skipped" if results.num_unknown else ""
    table = Table(
        caption=f"{results.num_results} items, {proven}{unknown} · bundle {results.bundle_id} · "
        f"version {results.model_version} · {milliseconds:.1f} ms"
    )
    for name, side in (("#", "right"), ("item", "left"), ("score", "right"), ("semantic ID", "left")):
        table.add_column(name, justify=side, overflow="fold")  # type: ignore[arg-type]
    for rank, ((item, score), codes) in enumerate(zip(results, results.codes.tolist(), strict=True), 1):
        table.add_row(str(rank), str(item), f"{score:.4f}", " ".join(str(code) for code in codes if code >= 0))
    return table
