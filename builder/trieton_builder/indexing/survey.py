"""What a pass over sorted rows finds out before anything is written: sizes of all tensors and where the tail begins."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from trieton.compiled import cached_njit
from trieton.index.named_sets import positions_type, stored_as_bits

from trieton_builder.catalogue.keys import KeyLayout
from trieton_builder.indexing.sorted_rows import SortedChunk, SortedRows

Progress = Callable[[str, int, int], None]  # stage, rows done, rows in all
INT32_MAX = int(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class Survey:
    """Counts over a whole sorted catalogue.

    Attributes:
        layout: levels and codebook sizes.
        has_end: whether some semantic ID is short.
        id_type: dtype of the item ids.
        num_items: rows.
        num_leaves: distinct semantic IDs.
        edges: edges of each level, [num_levels].
        head_levels: levels before the tail.
        members: size of each named set, in order of the names.
    """

    layout: KeyLayout
    has_end: bool
    id_type: np.dtype
    num_items: int
    num_leaves: int
    edges: tuple[int, ...]
    head_levels: int
    members: dict[str, int]

    def code_type(self, level: int) -> np.dtype:
        """The smallest unsigned type for codes of a level."""
        return code_type(self.layout.sizes[level] + self.has_end)

    def tail_type(self) -> np.dtype:
        """One type for all tail levels."""
        return np.result_type(np.uint8, *map(self.code_type, range(self.head_levels, self.layout.num_levels)))

    def spec(self) -> dict:
        """The entry of the file's header from which `StaticIndex.from_tensors` rebuilds."""
        return {
            "codebook_sizes": list(self.layout.sizes),
            "has_end": self.has_end,
            "head_levels": self.head_levels,
            "num_items": self.num_items,
            "num_leaves": self.num_leaves,
            "text_ids": self.id_type.kind == "S",
        }

    def tensor_specs(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Dtype and shape of every tensor of the index, by its name in a file."""
        head, levels = self.head_levels, self.layout.num_levels
        states = (1, *self.edges)
        below = [*self.edges[:head], self.num_leaves]
        specs: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        for level in range(head):
            specs[f"trie.codes.{level}"] = self.code_type(level), (self.edges[level],)
        for level in range(head + (head < levels)):
            specs[f"trie.row_ptr.{level}"] = offset_type(below[level]), (states[level] + 1,)
        specs["trie.tail"] = self.tail_type(), (levels - head, self.num_leaves)
        if self.id_type.kind == "S":
            specs["items.ids"] = np.dtype(np.uint8), (self.num_items, self.id_type.itemsize)
        else:
            specs["items.ids"] = self.id_type, (self.num_items,)
        specs["items.order"] = offset_type(self.num_items), (self.num_items,)
        if self.num_leaves < self.num_items:
            specs["items.leaf_ptr"] = offset_type(self.num_items), (self.num_leaves + 1,)
        for name, size in self.members.items():
            if stored_as_bits(size, self.num_items):
                specs[f"sets.{name}"] = np.dtype(np.uint8), ((self.num_items + 7) // 8,)
            else:
                specs[f"sets.{name}"] = positions_type(self.num_items), (size,)
        return specs


def code_type(size: int) -> np.dtype:
    """The smallest unsigned type for codes below `size`."""
    return np.min_scalar_type(max(size - 1, 0))


def offset_type(largest: int) -> np.dtype:
    """int32, or int64 where an offset would not fit."""
    return np.dtype(np.int32 if largest <= INT32_MAX else np.int64)


def chunk_rows(layout: KeyLayout) -> int:
    """Rows per chunk: buffers of all levels stay within a few megabytes."""
    return max(1024, (1 << 21) // layout.num_levels)


def read_chunks(rows: SortedRows, stage: str, progress: Progress | None) -> Iterator[SortedChunk]:
    """The chunks of `rows`, telling `progress` about each."""
    done = 0
    for chunk in rows.chunks(chunk_rows(rows.layout)):
        yield chunk
        done += len(chunk.ids)
        if progress:
            progress(stage, done, rows.num_rows)


def survey_rows(rows: SortedRows, max_tail_span: int, progress: Progress | None = None) -> Survey:
    """Count states, spans and set members of all levels in one pass."""
    layout = rows.layout
    levels = layout.num_levels
    edges, opened, spans = (np.zeros(levels, np.int64) for _ in range(3))
    previous = np.full(layout.num_keys, -1, np.int64)  # no key is negative: the first row differs at every level
    members = np.zeros(len(rows.set_names), np.int64)
    leaves = num_items = depth = 0
    for chunk in read_chunks(rows, "count", progress):
        leaves, depth = _count(chunk.keys, layout.places, previous, edges, opened, spans, leaves, depth)
        num_items += len(chunk.ids)
        for number, places in chunk.sets.members():
            members[number] += len(places)
    edges = np.cumsum(edges)  # an edge of a level opens with every leaf that differs there or before
    if leaves:
        opened[depth:] = leaves - 1
        np.maximum(spans, leaves - opened, out=spans)
    types = [code_type(size + rows.has_end) for size in layout.sizes]
    head = _tail_start([1, *edges.tolist()], [leaves, *spans.tolist()], types, leaves, max_tail_span)
    sizes = dict(zip(rows.set_names, members.tolist(), strict=True))
    return Survey(layout, rows.has_end, rows.id_type, num_items, leaves, tuple(edges.tolist()), head, sizes)


def _tail_start(
    states: list[int], widest: list[int], types: list[np.dtype], num_leaves: int, max_tail_span: int
) -> int:
    """The level at which the tail begins: the smallest index among those whose states span few leaves.

    Args:
        states: states before each level, [num_levels + 1].
        widest: leaves of the widest state before each level, [num_levels + 1].
    """
    num_levels = len(types)
    best, best_bytes = num_levels, None
    for head in range(num_levels, -1, -1):
        if head < num_levels and widest[head] > max_tail_span:
            break
        size = sum(states[level + 1] * types[level].itemsize for level in range(head))
        size += sum(4 * states[level] for level in range(head + (head < num_levels)))
        size += num_leaves * sum(t.itemsize for t in types[head:])
        if best_bytes is None or size < best_bytes:
            best, best_bytes = head, size
    return best


@cached_njit(nogil=True)
def first_difference(keys, row, previous, places):
    """The first level at which a row differs from `previous`; num_levels when it does not."""
    for level in range(places.shape[1]):
        key = places[0, level]
        if (keys[key, row] ^ previous[key]) >> places[1, level]:
            return level
    return places.shape[1]


@cached_njit(nogil=True)
def _count(keys, places, previous, edges, opened, spans, leaves, depth_before):
    """Count on; `opened[level]`: leaf that opened the newest edge of a level, for levels before `depth_before` only.

    The levels from `depth_before` on were opened by the leaf before, so their spans need no look while the chain goes
    on: deep levels cost nothing. `edges[level]` counts leaves that first differ at that level.
    """
    for row in range(keys.shape[1]):
        depth = first_difference(keys, row, previous, places)
        if depth == places.shape[1]:
            continue
        for level in range(depth_before, depth):
            opened[level] = leaves - 1
        for level in range(depth, depth_before):
            spans[level] = max(spans[level], leaves - opened[level])
        depth_before = depth
        edges[depth] += 1
        leaves += 1
        for key in range(keys.shape[0]):
            previous[key] = keys[key, row]
    return leaves, depth_before
