"""`trieton doctor`: does this machine have what the server needs?"""

from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, err, out, print_json

MARKS = {"ok": Text("ok", "green"), "note": Text("note", "yellow"), "fail": Text("FAIL", "red")}


@app.command()
@clean_errors
def doctor(
    folder: Path = typer.Argument(Path(), help="Where bundles and repositories will lie; its disk is looked at."),
    start: bool = typer.Option(True, help="Also start the real server on a trivial model (about 5 s)."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Check this machine for the server: each finding with what to do. Exit code 1 if something must be fixed."""
    from trieton_builder.server.doctor import examine

    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    with err.status("examining ..."):
        findings = list(examine(folder, start=start))
    if as_json:
        print_json([finding.to_json() for finding in findings])
    else:
        table = Table("check", "", show_edge=False)
        table.add_column("found", overflow="fold")
        table.add_column("what to do", overflow="fold")
        for finding in findings:
            table.add_row(finding.check, MARKS[finding.status], finding.text, finding.remedy)
        out.print(table)
    failed = [finding.check for finding in findings if finding.status == "fail"]
    if failed:
        err.print(f"trieton: {len(failed)} finding(s) to fix: {', '.join(failed)}")
        raise typer.Exit(1)
