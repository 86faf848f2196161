"""`trieton semantic-ids`: item vectors -> semantic IDs, in a table that `trieton build` reads."""

from pathlib import Path

import typer
from rich.table import Table

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, err, goes_with, out, print_json

# How Polars calls the writing of what `trieton build` reads.
SUFFIXES = {".parquet": "write_parquet", ".csv": "write_csv", ".jsonl": "write_ndjson"}


@app.command("semantic-ids")
@clean_errors
def semantic_ids_command(
    vectors: Path = typer.Argument(help="Item vectors: .npy [N, D], or Parquet or JSON lines with a list column."),
    output: Path = typer.Option(
        ..., "--out", "-o", help="The table to write, .parquet, .csv or .jsonl: item_id, code_0, code_1, ..."
    ),
    codebook_sizes: str = typer.Option("256,256,256", help="Codes of each level."),
    separate: bool = typer.Option(
        True,
        "--separate-collisions/--keep-collisions",
        help="Number the items of one semantic ID in a last level; it has one code where none collide.",
    ),
    vector_column: str | None = typer.Option(None, help="The column of vectors in a table; vector by default."),
    item_id: str | None = typer.Option(
        None, help="The column of item ids in a table; item_id by default. Rows of .npy are numbered."
    ),
    seed: int = typer.Option(0, help="Of the k-means."),
    as_json: bool = typer.Option(False, "--json", help="Print the quality as JSON."),
) -> None:
    """Make semantic IDs by residual k-means, and print how good they are."""
    import polars as pl

    from trieton_builder.bundle.protected import refuse_inside
    from trieton_builder.catalogue.semantic_ids import semantic_ids
    from trieton_builder.catalogue.vectors import read_vectors
    from trieton_builder.cli.build import parse_numbers
    from trieton_builder.files.whole_file import whole_file

    refuse_inside(output)
    sizes = parse_numbers(codebook_sizes, "--codebook-sizes")
    if output.suffix not in SUFFIXES:
        raise ValueError(f"{output}: expected a name that ends in {', '.join(SUFFIXES)}")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"{output.parent}: no such folder to write {output.name} to")
    goes_with("--vector-column", vector_column, "a table", vectors.suffix.lower() != ".npy")
    goes_with("--item-id", item_id, "a table", vectors.suffix.lower() != ".npy")
    ids, values = read_vectors(vectors, vector_column or "vector", item_id or "item_id")
    with err.status(f"clustering {len(values):,} vectors of {values.shape[1]} numbers ..."):
        made = semantic_ids(values, sizes, separate_collisions=separate, seed=seed)
    frame = pl.DataFrame([ids, *(pl.Series(f"code_{level}", codes) for level, codes in enumerate(made.codes.T))])
    with whole_file(output) as partial:
        getattr(frame, SUFFIXES[output.suffix])(partial)
    if as_json:
        print_json(
            {
                "items": len(values),
                "codebook_sizes": list(made.codebook_sizes),
                "collisions": made.collisions,
                "largest_collision": made.largest_collision,
                "levels": [
                    {"codes_used": q.codes_used, "entropy_bits": q.entropy, "error": q.error} for q in made.levels
                ],
            }
        )
        return
    table = Table("level", show_edge=False)
    for name in ("codes used", "entropy (bits)", "error left"):
        table.add_column(name, justify="right")
    for level, quality in enumerate(made.levels):
        size = made.codebook_sizes[level]
        table.add_row(str(level), f"{quality.codes_used} of {size}", f"{quality.entropy:.2f}", f"{quality.error:.1%}")
    out.print(table)
    if made.collisions:
        kept = "separated by a last level" if separate else "kept"
        said = f"{made.collisions:,} items collide, up to {made.largest_collision:,} on one ID; {kept}"
    else:
        said = "no items collide"
        if separate:  # the levels are the retriever's, which outlives this catalogue
            said += "; the last level has one code, and room for collisions to come; without: --keep-collisions"
    out.print(said, soft_wrap=True)
    options = f"--codebook-sizes {','.join(map(str, made.codebook_sizes))}"
    if output.suffix == ".csv" and ids.dtype == pl.String:
        options += " --text-ids"
    out.print(f"{output}: for trieton build with {options}", soft_wrap=True)
