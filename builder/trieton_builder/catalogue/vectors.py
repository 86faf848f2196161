"""Item vectors from files."""

from pathlib import Path

import numpy as np
import polars as pl

from trieton_builder.catalogue.columns import CatalogError
from trieton_builder.catalogue.tables import read_table


def read_vectors(path: Path, vector_column: str, id_column: str) -> tuple[pl.Series, np.ndarray]:
    """Item ids [N], named `item_id`, and vectors float32 or float64 [N, D].

    Args:
        path: .npy of shape [N, D], whose rows are numbered; or a table, as `trieton build` reads them: Parquet or JSON
            lines, one file or more.

    Raises:
        CatalogError: names file, column and row.
    """
    if path.suffix.lower() == ".npy":
        try:
            vectors = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise CatalogError(f"{path}: not readable: {error}") from None
        if vectors.ndim != 2 or vectors.dtype not in (np.float32, np.float64):
            raise CatalogError(f"{path}: expected float32 or float64 [N, D], got {vectors.dtype} {vectors.shape}")
        return pl.Series("item_id", np.arange(len(vectors))), vectors
    table = read_table(path, [vector_column, id_column])
    column, ids = table.frame[vector_column], table.frame[id_column]
    for series in (column, ids):
        if series.null_count():
            raise table.fault(series.name, int(series.is_null().arg_max() or 0), "nothing there")
    if isinstance(column.dtype, pl.Array):
        column = column.arr.to_list()
    if not isinstance(column.dtype, pl.List) or column.dtype.inner not in (pl.Float32, pl.Float64):
        raise CatalogError(f"{path}: column {vector_column!r}: expected lists of floats, got {column.dtype}")
    lengths = column.list.len()
    if lengths.n_unique() > 1:
        row = int((lengths != lengths[0]).arg_max() or 0)
        what = f"expected {lengths[0]} numbers as in the first row, got {lengths[row]}"
        raise table.fault(vector_column, row, what)
    flat = column.explode(empty_as_null=False)
    if flat.null_count():
        row = int(flat.is_null().arg_max() or 0) // int(lengths[0])
        raise table.fault(vector_column, row, "a number is missing")
    return table.item_ids(id_column).alias("item_id"), flat.to_numpy().reshape(len(column), -1)
