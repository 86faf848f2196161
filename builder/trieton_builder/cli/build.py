"""`trieton build`: a catalogue on disk -> an index file, or with a retriever a whole bundle."""

import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trieton_builder.cli import app
from trieton_builder.cli.common import CONSTRAINT_HELP, clean_errors, err, goes_with, out, print_json

if TYPE_CHECKING:
    from trieton.retriever.spec import RetrieverSpec, TokenMap

    from trieton_builder.catalogue.read import CatalogSource
    from trieton_builder.indexing.sorted_files import SortEngine
    from trieton_builder.indexing.survey import Progress

_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@app.command()
@clean_errors
def build(
    catalogue: str = typer.Argument(
        help="Parquet, CSV, JSON lines, or JSON of item -> codes: a file, folder or pattern."
    ),
    output: Path = typer.Option(..., "--out", "-o", help="The index file to write; with --retriever a new directory."),
    codebook_sizes: str | None = typer.Option(None, help="Codes of each level, e.g. 256,256,256."),
    retriever: Path | None = typer.Option(None, help="An exported retriever: write a whole bundle with it."),
    codes: str | None = typer.Option(
        None, help="The list column, or a column per level: a,b,c; by itself codes, else code_0, .."
    ),
    item_id: str | None = typer.Option(None, help="The column of item ids; item_id by default."),
    row_ids: bool = typer.Option(False, help="There are no item ids: number the items by their rows."),
    text_ids: bool = typer.Option(False, help="Item ids are strings; other files than CSV and JSON say so themselves."),
    sets: list[str] = typer.Option(
        [], "--set", help="A column to keep as a named set, booleans or 0 and 1; repeatable."
    ),
    set_names: str | None = typer.Option(None, help="A column with the names of an item's sets, a list or text."),
    set_separator: str | None = typer.Option(None, help="Between the names of --set-names in text; | by default."),
    variable_length: bool = typer.Option(False, help="Semantic IDs may be shorter than the number of levels."),
    code_pattern: str | None = typer.Option(None, help=r"Codes are text such as <a_12>: a pattern like '<\w_(\d+)>'."),
    token_offsets: str | None = typer.Option(None, help="Codes are model tokens: first token of each level, a,b,c."),
    end_token: int | None = typer.Option(None, help="With --token-offsets: the token that ends a short semantic ID."),
    retriever_tokens: bool = typer.Option(False, help="Codes are tokens of the retriever's own token map."),
    engine: str = typer.Option("auto", help="What sorts: polars, duckdb, spark, or auto by size."),
    memory: str = typer.Option("4GB", help="Memory that the build may use."),
    work_dir: Path | None = typer.Option(None, help="Where sorted runs go; for a cluster, storage all machines share."),
    spark_conf: list[str] = typer.Option([], help="With --engine spark: a setting, key=value; may be repeated."),
    drop_repeats: bool = typer.Option(False, help="Drop rows that repeat an item with the same semantic ID."),
    expression: list[str] = typer.Option(
        [],
        help="With --retriever: a constraint to compile when the bundle loads; repeatable. Rules: --base-constraint.",
    ),
    base_constraint: str | None = typer.Option(
        None, help=f"With --retriever: a constraint that every request to the bundle is held to. {CONSTRAINT_HELP}"
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Sort, check and index a catalogue; with --retriever write the bundle of a version."""
    from trieton.constraint.expressions import parse
    from trieton.index.static_index import StaticIndex
    from trieton.retriever.spec import RetrieverSpec

    from trieton_builder.bundle.protected import refuse_inside
    from trieton_builder.catalogue.columns import Columns
    from trieton_builder.catalogue.keys import KeyLayout
    from trieton_builder.catalogue.read import CatalogSource
    from trieton_builder.indexing.build_file import build_file, work_folder

    started = time.perf_counter()
    goes_with("--expression", expression, "--retriever", retriever)
    goes_with("--base-constraint", base_constraint is not None, "--retriever", retriever)
    for text in [*expression, *([] if base_constraint is None else [base_constraint])]:
        parse(text)  # a slip is known before minutes of sorting
    goes_with("--set-separator", set_separator is not None, "--set-names", set_names is not None)
    goes_with("--spark-conf", spark_conf, "--engine spark", engine == "spark")
    goes_with("--item-id", item_id is not None, "ids, not --row-ids", not row_ids)
    goes_with("--text-ids", text_ids, "ids, not --row-ids", not row_ids)
    refuse_inside(output, work_dir and work_dir / "rows")
    spec = RetrieverSpec.load(retriever) if retriever else None
    if retriever and output.exists():
        raise FileExistsError(f"{output}: exists already; a bundle is never changed, choose another directory")
    sizes = _codebook_sizes(codebook_sizes, spec)
    columns = Columns(
        codes=() if codes is None else tuple(codes.split(",")),
        item_id=None if row_ids else "item_id" if item_id is None else item_id,
        text_ids=text_ids,
        set_columns=tuple(dict.fromkeys(sets)),
        set_names=set_names,
        set_separator="|" if set_separator is None else set_separator,
        variable_length=variable_length,
        code_pattern=code_pattern,
    )
    token_map = _token_map(token_offsets, end_token, retriever_tokens, spec, sizes)
    source = CatalogSource(catalogue, KeyLayout.of(sizes), columns, token_map)
    sorts: str | SortEngine = engine
    if engine == "spark":
        from trieton_builder.indexing.sorter_spark import SparkEngine

        sorts = SparkEngine.connect(dict(_setting(text) for text in spark_conf))
    options: dict[str, Any] = {
        "engine": sorts,
        "memory": parse_memory(memory),
        "drop_repeats": drop_repeats,
        "work_dir": work_dir,
    }
    report: dict[str, Any] = {"path": str(output)}
    with _progress() as progress:
        if retriever is None:
            built = build_file(source, output, **options, progress=progress)
            report["bytes"] = output.stat().st_size
        else:
            from trieton_builder.bundle.write import write_bundle

            output.parent.mkdir(parents=True, exist_ok=True)
            with work_folder(output.parent, output.name) as folder:
                built = build_file(source, folder / "index.safetensors", **options, progress=progress)
                progress("bundle", 0, 1)
                report["bundle_id"] = write_bundle(
                    output,
                    index=StaticIndex.load(built.path, verify=False),
                    retriever_dir=retriever,
                    provenance=_provenance(source, drop_repeats),
                    expressions=expression,
                    base_constraint=base_constraint,
                )
                progress("bundle", 1, 1)
    report |= {"items": built.num_items, "dropped_rows": built.dropped, "engine": built.engine}
    report["seconds"] = round(time.perf_counter() - started, 2)
    if unused := source.unused_booleans():
        asked = " ".join(f"--set {shlex.quote(name)}" for name in unused)
        err.print(f"boolean columns not made into named sets: {', '.join(unused)}; to have them: {asked}")
    if as_json:
        print_json(report)
        return
    if built.dropped:
        out.print(f"{built.dropped:,} rows repeat an item and were dropped", soft_wrap=True)
    what = f"bundle {report['bundle_id']}" if retriever else f"{report['bytes']:,} bytes"
    out.print(
        f"{output}: {built.num_items:,} items, {what}, {report['seconds']:.1f} s ({built.engine})", soft_wrap=True
    )


def parse_memory(text: str) -> int:
    """Bytes from 4GB, 4GiB, 512M or plain bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", text.upper())
    if match is None:
        raise ValueError(f"memory: expected a size such as 4GB or 512MB, got {text!r}")
    number, unit, binary = match.groups()
    scale = 1024 ** " KMGT".index(unit) if binary and unit else _UNITS[unit]
    return int(float(number) * scale)


def parse_numbers(text: str, option: str) -> list[int]:
    """Integers from 256,256,256."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: expected numbers such as 256,256,256, got {text!r}") from None


def _codebook_sizes(given: str | None, spec: "RetrieverSpec | None") -> list[int]:
    theirs = list(spec.token_map.sizes) if spec else None
    if given is None:
        if theirs is None:
            raise ValueError("--codebook-sizes: how many codes has each level? e.g. --codebook-sizes 256,256,256")
        return theirs
    sizes = parse_numbers(given, "--codebook-sizes")
    if theirs is not None and sizes != theirs:
        raise ValueError(f"--codebook-sizes: {sizes} given, but the retriever's token map has {theirs}")
    return sizes


def _token_map(
    offsets: str | None, end_token: int | None, of_retriever: bool, spec: "RetrieverSpec | None", sizes: list[int]
) -> "TokenMap | None":
    from trieton.retriever.spec import TokenMap

    if of_retriever:
        if spec is None or offsets:
            raise ValueError("--retriever-tokens: needs --retriever, and goes without --token-offsets")
        return spec.token_map
    goes_with("--end-token", end_token is not None, "--token-offsets", offsets)
    if offsets is None:
        return None
    starts = parse_numbers(offsets, "--token-offsets")
    if len(starts) != len(sizes):
        raise ValueError(f"--token-offsets: expected {len(sizes)}, one per level, got {len(starts)}")
    return TokenMap(tuple(range(s, s + n) for s, n in zip(starts, sizes, strict=True)), end_token)


def _setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--spark-conf: expected key=value, got {text!r}")
    return key, value


def _provenance(source: "CatalogSource", drop_repeats: bool) -> dict[str, Any]:
    from trieton.bundle import describe_file

    files = {file.found.name: describe_file(file.path) for file in source.files}
    return {"command": "build", "catalogue": files, "sets": list(source.set_names), "drop_repeats": drop_repeats}


@contextmanager
def _progress() -> "Iterator[Progress]":
    """A bar per stage on stderr; gone when all is done."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    bars = Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    tasks: dict[str, Any] = {}

    def advance(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage)
        bars.update(tasks[stage], completed=done, total=total)

    with bars:
        yield advance
