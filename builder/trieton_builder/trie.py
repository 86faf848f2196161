"""Building the index: sort, check, then one pass that writes the trie level by level."""

from collections.abc import Mapping, Sequence

import numpy as np
from trieton.catalog import Catalog, encode_item_ids
from trieton.index import StaticIndex
from trieton.named_sets import NamedSets

MAX_TAIL_SPAN = 128  # leaves of a state that a tail level may have to scan


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
        drop_repeats: drop rows that repeat both semantic ID and item id instead of refusing them.

    Returns:
        The index. Items that share a leaf keep the order of the rows.

    Raises:
        ValueError: names row, level and value of the first thing that is wrong.
    """
    codes, sizes = _checked_codes(codes, codebook_sizes, lengths)
    num_rows, num_levels = codes.shape
    has_end = lengths is not None and bool((np.asarray(lengths) < num_levels).any())
    ids = _checked_ids(item_ids, num_rows)
    masks = _checked_sets(sets, num_rows)

    order = np.lexsort(codes.T[::-1])  # stable: rows of one leaf keep the caller's order
    keep = _without_repeats(codes, ids, order, drop_repeats)
    order = order[keep]
    codes, ids = codes[order], ids[order]
    masks = {name: mask[order] for name, mask in masks.items()}

    differs = np.ones((len(codes), num_levels), np.bool_)
    differs[1:] = np.logical_or.accumulate(codes[1:] != codes[:-1], axis=1)
    first = np.flatnonzero(differs[:, -1])  # first item of each leaf
    leaf_ptr = None if len(first) == len(codes) else _offsets(np.append(first, len(codes)))
    leaf_codes = codes[first]
    trie_codes, row_ptr, tail = _levels(leaf_codes, differs[first], sizes, has_end)
    by_id = np.argsort(ids, kind="stable")
    return StaticIndex(
        codebook_sizes=sizes,
        has_end=has_end,
        codes=trie_codes,
        row_ptr=row_ptr,
        tail=tail,
        catalog=Catalog(ids, by_id.astype(_offset_type(len(ids))), leaf_ptr),
        sets=NamedSets.from_masks(masks, len(ids)),
    )


def _levels(
    leaf_codes: np.ndarray, differs: np.ndarray, sizes: tuple[int, ...], has_end: bool
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], np.ndarray]:
    """Level arrays from sorted distinct leaves [N, L]; `differs[i, l]`: leaf i opens a new edge at level l."""
    num_leaves, num_levels = leaf_codes.shape
    starts = [np.zeros(1, np.int64)] + [np.flatnonzero(differs[:, level]) for level in range(num_levels)]
    types = [_code_type(size + has_end) for size in sizes]
    head = _tail_start(starts, types, num_leaves)
    trie_codes, row_ptr = [], []
    for level in range(head):
        trie_codes.append(leaf_codes[starts[level + 1], level].astype(types[level]))
        ends = np.append(starts[level], num_leaves)
        row_ptr.append(_offsets(np.searchsorted(starts[level + 1], ends)))
    if head < num_levels:
        row_ptr.append(_offsets(np.append(starts[head], num_leaves)))
    tail_type = np.result_type(*types[head:]) if head < num_levels else np.uint8
    tail = np.ascontiguousarray(leaf_codes[:, head:].T.astype(tail_type))
    return tuple(trie_codes), tuple(row_ptr), tail


def _tail_start(starts: list[np.ndarray], types: list[np.dtype], num_leaves: int) -> int:
    """The level at which the tail begins: the smallest index among those whose states span few leaves."""
    num_levels = len(types)
    best, best_bytes = num_levels, None
    for head in range(num_levels, -1, -1):
        if head < num_levels and num_leaves and np.diff(starts[head], append=num_leaves).max() > MAX_TAIL_SPAN:
            break
        size = sum(len(starts[level + 1]) * types[level].itemsize for level in range(head))
        size += sum(4 * len(starts[level]) for level in range(head + (head < num_levels)))
        size += num_leaves * sum(t.itemsize for t in types[head:])
        if best_bytes is None or size < best_bytes:
            best, best_bytes = head, size
    return best


def _code_type(size: int) -> np.dtype:
    return np.min_scalar_type(max(size - 1, 0))


def _offset_type(largest: int) -> np.dtype:
    return np.dtype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)


def _offsets(values: np.ndarray) -> np.ndarray:
    return values.astype(_offset_type(int(values[-1])))


def _checked_codes(
    codes: np.ndarray, codebook_sizes: Sequence[int], lengths: np.ndarray | None
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Codes int64 [N, L] with the end code filled in, and the sizes; refuses everything that does not fit."""
    codes = np.asarray(codes)
    sizes = tuple(int(s) for s in codebook_sizes)
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"codebook_sizes: expected one positive number per level, got {sizes}")
    if codes.size == 0:
        codes = np.zeros((0, len(sizes)), np.int64)
    if codes.ndim != 2 or codes.shape[1] != len(sizes):
        raise ValueError(f"codes: expected shape [N, {len(sizes)}] (one column per codebook size), got {codes.shape}")
    if codes.dtype.kind not in "iu":
        raise ValueError(f"codes: expected integers, got dtype {codes.dtype}; convert them where they are made")
    bad = (codes < 0) | (codes >= np.array(sizes, dtype=np.uint64 if codes.dtype == np.uint64 else np.int64))
    inside = np.ones(codes.shape, np.bool_)
    if lengths is not None:
        lengths = np.asarray(lengths)
        if lengths.shape != (len(codes),) or lengths.dtype.kind not in "iu":
            raise ValueError(f"lengths: expected {len(codes)} integers, got {lengths.dtype} {lengths.shape}")
        wrong = np.flatnonzero((lengths < 1) | (lengths > len(sizes)))
        if wrong.size:
            raise ValueError(f"lengths: row {wrong[0]}: expected 1 to {len(sizes)}, got {lengths[wrong[0]]}")
        inside = np.arange(len(sizes)) < lengths[:, None]
    rows, levels = np.nonzero(bad & inside)
    if rows.size:
        row, level = int(rows[0]), int(levels[0])
        raise ValueError(
            f"codes: row {row}, level {level}: expected 0 <= code < {sizes[level]}, got {codes[row, level]}"
            + (f" ({rows.size} such codes)" if rows.size > 1 else "")
        )
    return np.where(inside, codes, np.array(sizes)).astype(np.int64), sizes


def _checked_ids(item_ids: Sequence[int] | Sequence[str] | np.ndarray | None, num_rows: int) -> np.ndarray:
    if item_ids is None:
        return np.arange(num_rows, dtype=np.int64)
    given = np.asarray(item_ids)
    ids = encode_item_ids(given, text=given.dtype.kind not in "iuf")
    if len(ids) != num_rows:
        raise ValueError(f"item_ids: expected {num_rows}, one per row of codes, got {len(ids)}")
    return ids


def _checked_sets(sets: Mapping[str, np.ndarray] | None, num_rows: int) -> dict[str, np.ndarray]:
    masks = {}
    for name, mask in (sets or {}).items():
        mask = np.asarray(mask)
        if mask.dtype != np.bool_ or mask.shape != (num_rows,):
            raise ValueError(f"sets: {name!r}: expected bool [{num_rows}], got {mask.dtype} {mask.shape}")
        masks[name] = mask
    return masks


def _without_repeats(codes: np.ndarray, ids: np.ndarray, order: np.ndarray, drop: bool) -> np.ndarray:
    """Places of `order` to keep; refuses an item id that stands twice (unless both rows are equal and `drop`)."""
    by_id = np.argsort(ids, kind="stable")
    same = np.flatnonzero(ids[by_id[1:]] == ids[by_id[:-1]])
    repeated = np.zeros(len(ids), np.bool_)
    for place in same:
        a, b = int(by_id[place]), int(by_id[place + 1])
        item = ids[a].decode() if ids.dtype.kind == "S" else int(ids[a])
        if (codes[a] != codes[b]).any():
            raise ValueError(
                f"item {item!r} has two semantic IDs: row {a} {codes[a].tolist()}, row {b} {codes[b].tolist()}"
            )
        if not drop:
            raise ValueError(
                f"item {item!r} with semantic ID {codes[a].tolist()} stands in rows {a} and {b}; "
                "drop_repeats=True keeps one"
            )
        repeated[b] = True
    return np.flatnonzero(~repeated[order])
