"""The pass that writes an index: sorted rows in, tensors out, a chunk at a time."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from trieton.compiled import cached_njit
from trieton.index.named_sets import positions_type
from trieton.index.static_index import StaticIndex
from trieton.index.tensorfile import TensorSpec

from trieton_builder.indexing.sorted_rows import SortedChunk, SortedRows
from trieton_builder.indexing.survey import Progress, Survey, chunk_rows, first_difference, read_chunks


class TensorSink(Protocol):
    """Where tensors grow. A context manager: what is not finished never appears."""

    def append(self, name: str, values: np.ndarray, *, row: int | None = None) -> None:
        """Append to a tensor, or to one row of a 2-D tensor."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class MemoryTensors:
    """Tensors that grow in memory."""

    def __init__(self, survey: Survey):
        self._survey = survey
        self._arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in survey.tensor_specs().items()}
        self._done: dict[tuple[str, int], int] = {}

    def append(self, name: str, values: np.ndarray, *, row: int | None = None) -> None:
        target = self._arrays[name] if row is None else self._arrays[name][row]
        start = self._done.get((name, row or 0), 0)
        target[start : start + len(values)] = values
        self._done[name, row or 0] = start + len(values)

    def index(self) -> StaticIndex:
        """The finished index."""
        return StaticIndex.from_tensors(self._arrays, self._survey.spec())

    def __enter__(self) -> "MemoryTensors":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._arrays = {}


def emit_order(rows: SortedRows, sink: TensorSink, survey: Survey, progress: Progress | None) -> np.ndarray:
    """Append `items.order`, and look for items that stand twice.

    Returns:
        Places [n, 2] (in the sorted rows) of neighbours with the same item id; nothing usable was written unless empty.
    """
    offset = survey.tensor_specs()["items.order"][0]
    repeats = []
    last_id, last_place, done = None, -1, 0
    for ids, places in rows.by_id(chunk_rows(rows.layout)):
        sink.append("items.order", places.astype(offset))
        same = np.flatnonzero(ids[1:] == ids[:-1])
        if last_id is not None and ids[0] == last_id:
            repeats.append(np.array([[last_place, places[0]]], np.int64))
        repeats.append(np.stack([places[same], places[same + 1]], axis=1).astype(np.int64))
        last_id, last_place = ids[-1], places[-1]
        done += len(ids)
        if progress:
            progress("order", done, rows.num_rows)
    return np.concatenate([np.zeros((0, 2), np.int64), *repeats])


def emit_trie(rows: SortedRows, sink: TensorSink, survey: Survey, progress: Progress | None) -> None:
    """Append every tensor but `items.order`."""
    specs = survey.tensor_specs()
    layout, head = survey.layout, survey.head_levels
    levels, size = layout.num_levels, chunk_rows(layout)
    totals = np.zeros(levels + 2, np.int64)  # edges of each level so far, then leaves, then items
    previous = np.full(layout.num_keys, -1, np.int64)
    codes = np.empty((levels, size), np.int32)
    offsets = np.empty((head + 2, size), np.int64)
    counts = np.zeros(levels + head + 2, np.int64)
    sets = _SetWriter(survey, specs)
    pointers = [f"trie.row_ptr.{level}" for level in range(head + (head < levels))]

    def append_offsets(name: str, values: np.ndarray) -> None:
        if name in specs:
            sink.append(name, values.astype(specs[name][0]))

    append_offsets("trie.row_ptr.0", np.zeros(1, np.int64))
    for chunk in read_chunks(rows, "write", progress):
        _split(chunk.keys, layout.places, head, previous, totals, codes, offsets, counts)
        for level in range(head):
            name = f"trie.codes.{level}"
            sink.append(name, codes[level, : counts[level]].astype(specs[name][0]))
        for level in range(head, levels):
            sink.append("trie.tail", codes[level, : counts[level]].astype(specs["trie.tail"][0]), row=level - head)
        for level in range(1, len(pointers)):
            append_offsets(pointers[level], offsets[level, : counts[levels + level]])
        append_offsets("items.leaf_ptr", offsets[head + 1, : counts[levels + head + 1]])
        ids = chunk.ids
        sink.append("items.ids", ids.view(np.uint8).reshape(len(ids), -1) if ids.dtype.kind == "S" else ids)
        sets.append(chunk, sink)
    below = [*survey.edges[:head], survey.num_leaves]
    for level, name in enumerate(pointers):
        append_offsets(name, np.array([below[level]]))
    append_offsets("items.leaf_ptr", np.array([survey.num_items]))
    sets.finish(sink)


class _SetWriter:
    """Appends the named sets, each in the form the survey chose: bits, eight items a byte, or positions."""

    def __init__(self, survey: Survey, specs: Mapping[str, TensorSpec]):
        self._names = [f"sets.{name}" for name in survey.members]
        self._type = positions_type(survey.num_items)
        # Bits of the byte that is not full yet. There are few sets in bits: each has a share of all items.
        self._pending = {
            number: np.zeros(0, np.bool_) for number, name in enumerate(self._names) if specs[name][0] == np.uint8
        }
        self._start = 0

    def append(self, chunk: SortedChunk, sink: TensorSink) -> None:
        size = len(chunk.ids)
        as_bits = {}
        for number, rows in chunk.sets.members():
            if number in self._pending:
                as_bits[number] = rows
            else:
                sink.append(self._names[number], rows.astype(self._type) + self._type.type(self._start))
        for number, pending in self._pending.items():
            mask = np.zeros(len(pending) + size, np.bool_)
            mask[: len(pending)] = pending
            if number in as_bits:
                mask[as_bits[number] + len(pending)] = True
            whole = len(mask) // 8 * 8
            sink.append(self._names[number], np.packbits(mask[:whole], bitorder="little"))
            self._pending[number] = mask[whole:].copy()
        self._start += size

    def finish(self, sink: TensorSink) -> None:
        for number, pending in self._pending.items():
            sink.append(self._names[number], np.packbits(pending, bitorder="little"))


@cached_njit(nogil=True)
def _split(keys, places, head, previous, totals, codes, offsets, counts):
    """Split a chunk into what each tensor gains.

    codes[level, :counts[level]]: of new edges in the head, of all new leaves in the tail. offsets[level, :counts[levels
    + level]]: first edge (in the tail: first leaf) of each new state before `level`; the last row: first item of each
    new leaf. `totals` runs on over the chunks.
    """
    levels = places.shape[1]
    counts[:] = 0
    for row in range(keys.shape[1]):
        depth = first_difference(keys, row, previous, places)
        item = totals[levels + 1]
        totals[levels + 1] += 1
        if depth == levels:
            continue
        for level in range(min(depth, head), levels):
            code = (keys[places[0, level], row] >> places[1, level]) & places[2, level]
            codes[level, counts[level]] = code
            counts[level] += 1
            if level < head:
                totals[level] += 1
                # The edge opens a state; its first edge, or first leaf where the tail begins, comes next.
                opened = totals[level + 1] if level + 1 < head else totals[levels]
                offsets[level + 1, counts[levels + level + 1]] = opened
                counts[levels + level + 1] += 1
        offsets[head + 1, counts[levels + head + 1]] = item
        counts[levels + head + 1] += 1
        totals[levels] += 1
        for key in range(keys.shape[0]):
            previous[key] = keys[key, row]
