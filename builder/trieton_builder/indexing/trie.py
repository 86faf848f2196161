"""Building the index: check, sort, then a pass that writes the trie level by level.

The rows arrive sorted, in chunks, from any engine (`sorted_rows.py`). A survey counts the states and spans of every
level, which fixes where the tail begins and how large every tensor is; the pass after it appends to the tensors, in
memory or straight into the file. Neither holds more than a chunk.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from trieton.index.catalog import encode_item_ids
from trieton.index.named_sets import check_set_names
from trieton.index.static_index import StaticIndex
from trieton.resources import usable_cores

from trieton_builder.catalogue.columns import NO_ITEM
from trieton_builder.catalogue.keys import KeyLayout
from trieton_builder.indexing.emit import MemoryTensors, TensorSink, emit_order, emit_trie
from trieton_builder.indexing.row_sets import RowSets
from trieton_builder.indexing.sorted_rows import MemoryRows, SortedRows, number_row
from trieton_builder.indexing.survey import Progress, Survey, survey_rows

MAX_TAIL_SPAN = 128  # leaves of a state that a tail level may have to scan
_CHECK_ROWS = 1 << 17

Sink = TypeVar("Sink", bound=TensorSink)
Result = TypeVar("Result")


def build_index(
    codes: np.ndarray,
    *,
    codebook_sizes: Sequence[int],
    item_ids: Sequence[int] | Sequence[str] | np.ndarray | None = None,
    sets: Mapping[str, np.ndarray] | None = None,
    lengths: np.ndarray | None = None,
    drop_repeats: bool = False,
) -> StaticIndex:
    """Build the index of a catalogue that fits in memory.

    Args:
        codes: integers [N, L], level-local, in any order of rows.
        codebook_sizes: number of codes of each level, [L].
        item_ids: int64 or strings [N]; the row numbers when None.
        sets: named sets, {name: bool [N]}.
        lengths: integers [N] in 1..L where semantic IDs differ in length; what stands behind the length is ignored.
        drop_repeats: drop rows that repeat both semantic ID and item id, with a warning that says how many, instead of
            refusing them.

    Returns:
        The index. Items that share a leaf keep the order of the rows.

    Raises:
        ValueError: names row, level and value of the first thing that is wrong.
    """
    layout = KeyLayout.of(codebook_sizes)
    codes, lengths = _checked_shapes(codes, lengths, layout)
    ids = None if item_ids is None else _checked_ids(item_ids, len(codes))
    masks = _checked_sets(sets, len(codes))
    keys = _checked_keys(codes, lengths, layout)
    has_end = lengths is not None and bool((lengths < layout.num_levels).any())
    rows = MemoryRows(layout, has_end, keys, ids, RowSets.of_masks(masks))

    index, dropped = write_index(rows, MemoryTensors, MemoryTensors.index, drop_repeats=drop_repeats)
    if dropped:
        warnings.warn(f"{dropped} rows repeat an item and were dropped", stacklevel=2)
    return index


def write_index(
    rows: SortedRows,
    open_sink: Callable[[Survey], Sink],
    finish: Callable[[Sink], Result],
    *,
    drop_repeats: bool,
    progress: Progress | None = None,
    describe: Callable[[int], str] = number_row,
) -> tuple[Result, int]:
    """Write the index of sorted rows into a sink.

    Args:
        open_sink: makes the sink once the sizes are known.
        finish: takes the full sink and gives the result.
        drop_repeats: drop rows that repeat both semantic ID and item id instead of refusing them.
        progress: told about every chunk.
        describe: how messages call a row.

    Returns:
        The result, and how many rows were dropped.

    Raises:
        ValueError: one item in two rows.
    """
    dropped = 0
    while True:
        survey = survey_rows(rows, MAX_TAIL_SPAN, progress)
        with open_sink(survey) as sink:
            repeats = emit_order(rows, sink, survey, progress)
            if not len(repeats):
                emit_trie(rows, sink, survey, progress)
                return finish(sink), dropped
        numbers, keys = rows.locate(repeats.reshape(-1))
        numbers, keys = numbers.reshape(-1, 2), keys.reshape(-1, len(repeats), 2)
        _check_repeats(rows, repeats, numbers, keys, drop_repeats, describe)
        dropped += len(repeats)
        rows = rows.without(np.sort(numbers[:, 1]))


def _check_repeats(
    rows: SortedRows,
    places: np.ndarray,
    numbers: np.ndarray,
    keys: np.ndarray,
    drop_repeats: bool,
    describe: Callable[[int], str],
) -> None:
    """Refuse pairs of rows [n, 2] that give one item twice, unless they are equal and may be dropped."""
    differ = (keys[:, :, 0] != keys[:, :, 1]).any(axis=0)
    if drop_repeats and not differ.any():
        return
    pair = int(np.argmax(differ))
    (item,) = rows.ids_at(places[pair, :1])
    item = item.decode() if isinstance(item, bytes) else int(item)
    first, second = (rows.layout.unpack(keys[:, pair, side, None])[0] for side in (0, 1))
    a, b = (describe(int(number)) for number in numbers[pair])
    if differ.any():
        raise ValueError(f"item {item!r} has two semantic IDs: {a} {_text(first, rows)}, {b} {_text(second, rows)}")
    raise ValueError(
        f"item {item!r} with semantic ID {_text(first, rows)} stands in {a} and {b}; drop repeats to keep one "
        f"({len(places)} such rows)"
    )


def _text(codes: np.ndarray, rows: SortedRows) -> str:
    """A semantic ID as people write it, without end codes."""
    return str([int(code) for code, size in zip(codes, rows.layout.sizes, strict=True) if code < size])


def _checked_shapes(
    codes: np.ndarray, lengths: np.ndarray | None, layout: KeyLayout
) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes [N, L] of some integer type, and lengths [N]; refuses other shapes and types."""
    codes = np.asarray(codes)
    levels = layout.num_levels
    if codes.size == 0 and codes.ndim <= 2 and (codes.ndim < 2 or len(codes) == 0):
        codes = np.zeros((0, levels), np.int64)
    if codes.ndim != 2 or codes.shape[1] != levels:
        raise ValueError(f"codes: expected shape [N, {levels}] (one column per codebook size), got {codes.shape}")
    if codes.dtype.kind not in "iu":
        raise ValueError(f"codes: expected integers, got dtype {codes.dtype}; convert them where they are made")
    if lengths is not None:
        lengths = np.asarray(lengths)
        if lengths.size == 0 and len(codes) == 0:
            lengths = np.zeros(0, np.int64)
        if lengths.shape != (len(codes),) or lengths.dtype.kind not in "iu":
            raise ValueError(f"lengths: expected {len(codes)} integers, got {lengths.dtype} {lengths.shape}")
        wrong = np.flatnonzero((lengths < 1) | (lengths > levels))
        if wrong.size:
            raise ValueError(f"lengths: row {wrong[0]}: expected 1 to {levels}, got {lengths[wrong[0]]}")
    return codes, lengths


def _checked_keys(codes: np.ndarray, lengths: np.ndarray | None, layout: KeyLayout) -> list[np.ndarray]:
    """Sort keys of all rows, a piece at a time; refuses codes outside their codebook."""
    keys = [np.empty(len(codes), np.int64) for _ in range(layout.num_keys)]

    def pack(start: int) -> tuple[int, int, int]:
        part = slice(start, start + _CHECK_ROWS)
        packed, found = layout.pack(codes[part], None if lengths is None else lengths[part])
        for key, values in zip(keys, packed, strict=True):
            key[part] = values
        return found

    starts = range(0, len(codes), _CHECK_ROWS)
    with ThreadPoolExecutor(min(4, usable_cores())) as threads:
        found = list(threads.map(pack, starts))
    for start, (bad, row, level) in zip(starts, found, strict=True):
        if bad:
            raise ValueError(
                bad_code_text(start + row, level, codes[start + row, level], layout, sum(f[0] for f in found))
            )
    return keys


def bad_code_text(row: int, level: int, code: int, layout: KeyLayout, bad_codes: int) -> str:
    """The message for the first of `bad_codes` codes outside their codebooks."""
    more = f" ({bad_codes} such codes)" if bad_codes > 1 else ""
    return f"codes: row {row}, level {level}: expected 0 <= code < {layout.sizes[level]}, got {code}{more}"


def _checked_ids(item_ids: Sequence[int] | Sequence[str] | np.ndarray, num_rows: int) -> np.ndarray:
    ids = encode_item_ids(item_ids, text=np.asarray(item_ids).dtype.kind not in "iufcb")
    if len(ids) != num_rows:
        raise ValueError(f"item_ids: expected {num_rows}, one per row of codes, got {len(ids)}")
    if ids.dtype.kind == "i" and (ids == NO_ITEM).any():
        row = int(np.argmax(ids == NO_ITEM))
        raise ValueError(f"item_ids: row {row}: {NO_ITEM} is no item id: in an answer it means that there is no item")
    return ids


def _checked_sets(sets: Mapping[str, np.ndarray] | None, num_rows: int) -> dict[str, np.ndarray]:
    masks = {}
    for name, mask in (sets or {}).items():
        if not name.strip():
            raise ValueError(f"sets: expected a name, got {name!r}")
        mask = np.asarray(mask)
        if mask.dtype != np.bool_ or mask.shape != (num_rows,):
            raise ValueError(f"sets: {name!r}: expected bool [{num_rows}], got {mask.dtype} {mask.shape}")
        masks[name] = mask
    try:
        check_set_names(masks)
    except ValueError as error:
        raise ValueError(f"sets: {error}") from None
    return masks
