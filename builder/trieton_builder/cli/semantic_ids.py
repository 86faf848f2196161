"""`trieton semantic-ids`: item vectors -> semantic IDs, in a table that `trieton build` reads."""

from pathlib import Path

import typer
from rich.table import Table

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, err, out, print_json


@app.command("semantic-ids")
@clean_errors
def semantic_ids_command(
    vectors: Path = typer.Argument(help="Item vectors: .npy [N, D], or Parquet with a list column."),
    output: Path = typer.Option(..., "--out", "-o", help="The Parquet file to write: item_id, code_0, code_1, ..."),
    codebook_sizes: str = typer.Option("256,256,256", help="Codes of each level."),
    separate: bool = typer.Option(
        True, "--separate-collisions/--keep-collisions", help="Number the items of one semantic ID in a last level."
    ),
    vector_column: str = typer.Option("vector", help="The column of vectors in Parquet."),
    item_id: str = typer.Option("item_id", help="The column of item ids in Parquet; .npy rows are numbered."),
    seed: int = typer.Option(0, help="Of the k-means."),
    as_json: bool = typer.Option(False, "--json", help="Print the quality as JSON."),
) -> None:
    """Make semantic IDs by residual k-means, and print how good they are."""
    import polars as pl

    from trieton_builder.cli.build import parse_numbers
    from trieton_builder.semantic_ids import semantic_ids
    from trieton_builder.vectors_input import read_vectors

    ids, values = read_vectors(vectors, vector_column, item_id)
    if not output.parent.is_dir():
        raise FileNotFoundError(f"{output.parent}: no such folder to write {output.name} to")
    with err.status(f"clustering {len(values):,} vectors of {values.shape[1]} numbers ..."):
        made = semantic_ids(
            values, parse_numbers(codebook_sizes, "--codebook-sizes"), separate_collisions=separate, seed=seed
        )
    columns = {f"code_{level}": made.codes[:, level] for level in range(made.codes.shape[1])}
    partial = output.with_name(f".{output.name}.partial")
    try:
        pl.DataFrame([ids, *(pl.Series(name, codes) for name, codes in columns.items())]).write_parquet(partial)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    sizes = ",".join(map(str, made.codebook_sizes))
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
    kept = "separated by a last level" if separate else "kept"
    out.print(f"{made.collisions:,} items collide, up to {made.largest_collision:,} on one ID; {kept}", soft_wrap=True)
    out.print(f"{output}: for trieton build with --codebook-sizes {sizes}", soft_wrap=True)
