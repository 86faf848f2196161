"""Item vectors from files."""

from pathlib import Path

import numpy as np
import polars as pl

from trieton_builder.catalogue.columns import CatalogError


def read_vectors(path: Path, vector_column: str, id_column: str) -> tuple[pl.Series, np.ndarray]:
    """Item ids [N], named `item_id`, and vectors float32 or float64 [N, D].

    Args:
        path: .npy of shape [N, D], whose rows are numbered, or Parquet.

    Raises:
        CatalogError: names file, column and row.
    """
    if path.suffix == ".npy":
        try:
            vectors = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise CatalogError(f"{path}: not readable: {error}") from None
        if vectors.ndim != 2 or vectors.dtype not in (np.float32, np.float64):
            raise CatalogError(f"{path}: expected float32 or float64 [N, D], got {vectors.dtype} {vectors.shape}")
        return pl.Series("item_id", np.arange(len(vectors))), vectors
    try:
        frame = pl.read_parquet(path, glob=False)
    except pl.exceptions.PolarsError as error:
        raise CatalogError(f"{path}: not readable: {str(error).splitlines()[0]}") from None
    for name in (vector_column, id_column):
        if name not in frame.columns:
            raise CatalogError(f"{path}: column {name!r}: missing; the file has {', '.join(frame.columns)}")
        if frame[name].null_count():
            raise CatalogError(f"{path}: column {name!r}: row {frame[name].is_null().arg_max()}: nothing there")
    column = frame[vector_column]
    if isinstance(column.dtype, pl.Array):
        column = column.arr.to_list()
    if not isinstance(column.dtype, pl.List) or column.dtype.inner not in (pl.Float32, pl.Float64):
        raise CatalogError(f"{path}: column {vector_column!r}: expected lists of floats, got {column.dtype}")
    lengths = column.list.len()
    if lengths.n_unique() > 1:
        row = int((lengths != lengths[0]).arg_max() or 0)
        what = f"row {row}: expected {lengths[0]} numbers as in row 0, got {lengths[row]}"
        raise CatalogError(f"{path}: column {vector_column!r}: {what}")
    flat = column.explode(empty_as_null=False)
    if flat.null_count():
        row = int(flat.is_null().arg_max() or 0) // int(lengths[0])
        raise CatalogError(f"{path}: column {vector_column!r}: row {row}: a number is missing")
    return frame[id_column].alias("item_id"), flat.to_numpy().reshape(len(column), -1)
