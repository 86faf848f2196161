"""What an index holds and what it costs, level by level."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trieton.bundle import INDEX_FILES, MANIFEST, RETRIEVER, Bundle
from trieton.compiled import cached_njit
from trieton.index.static_index import StaticIndex
from trieton.retriever.spec import SPEC_FILE, RetrieverSpec


@dataclass(frozen=True)
class LevelStats:
    """One level of the trie.

    Attributes:
        codebook_size: codes that the level could have.
        codes_used: codes that some edge has; the end code is not counted.
        states: prefixes that this level goes on from.
        edges: their continuations, each a state of the next level.
        mean_fan_out, p99_fan_out, largest_fan_out: continuations per state.
        stored_as: "trie", or "tail" where the level is a row of the code matrix.
        nbytes: bytes of the level's tensors.
    """

    codebook_size: int
    codes_used: int
    states: int
    edges: int
    mean_fan_out: float
    p99_fan_out: int
    largest_fan_out: int
    stored_as: str
    nbytes: int


@dataclass(frozen=True)
class IndexStats:
    """A whole index.

    Attributes:
        items, leaves: items, and distinct semantic IDs.
        has_end: whether semantic IDs differ in length.
        text_ids: whether item ids are strings.
        trie_bytes: the trie without item ids and named sets.
        bytes_per_item: of the trie.
        floor_bytes_per_item: what any exact set of that many semantic IDs needs at least, log2(binomial(all, leaves)).
        item_bytes, set_bytes: the item table and the named sets.
        colliding_items: items that share their semantic ID.
        largest_collision: items of the fullest leaf.
        items_per_leaf: leaves by how many items they have: {"1": n, "2": n, ...}.
        sets: members of each named set.
        levels: the levels, in order.
    """

    items: int
    leaves: int
    has_end: bool
    text_ids: bool
    trie_bytes: int
    bytes_per_item: float
    floor_bytes_per_item: float
    item_bytes: int
    set_bytes: int
    colliding_items: int
    largest_collision: int
    items_per_leaf: dict[str, int]
    sets: dict[str, int]
    levels: tuple[LevelStats, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Inspected:
    """What lies at a path.

    Attributes:
        index: of an index file or a bundle; None for a retriever alone.
        spec: of a bundle or a retriever; None for an index alone.
        manifest: of a bundle.
    """

    index: StaticIndex | None = None
    spec: RetrieverSpec | None = None
    manifest: Mapping[str, Any] | None = None

    def bundle_facts(self) -> list[tuple[str, str]]:
        """Names and values of the manifest; empty where there is none."""
        if self.manifest is None:
            return []
        base, expressions = self.manifest.get("base_constraint"), self.manifest.get("expressions", ())
        return [
            ("bundle id", self.manifest["bundle_id"]),
            ("base constraint", base or "none"),
            ("compiled when loaded", ", ".join(expressions) or "nothing"),
        ]


def open_path(path: str | Path) -> Inspected:
    """Read an index file, a bundle's directory, or a retriever's.

    Raises:
        ValueError: damaged, or none of the three.
    """
    path = Path(path)
    if path.is_dir():
        if (path / SPEC_FILE).is_file() and not (path / MANIFEST).is_file():
            return Inspected(spec=RetrieverSpec.load(path))
        bundle = Bundle.open(path)
        return Inspected(bundle.index, RetrieverSpec.load(path / RETRIEVER), bundle.manifest)
    if path.name in INDEX_FILES and (path.parent / MANIFEST).is_file():
        raise ValueError(f"{path}: a part of the bundle {path.parent}; inspect the bundle's directory")
    return Inspected(StaticIndex.load(path))


def inspect_index(index: StaticIndex) -> IndexStats:
    """Count everything; one pass over each tensor."""
    items, leaves = index.num_items, index.num_leaves
    items_per_leaf = {"1": leaves} if leaves else {}
    if index.catalog.leaf_ptr is not None:
        sizes, counts = np.unique(np.diff(index.catalog.leaf_ptr), return_counts=True)
        items_per_leaf = {str(size): int(count) for size, count in zip(sizes, counts, strict=True)}
    return IndexStats(
        items=items,
        leaves=leaves,
        has_end=index.has_end,
        text_ids=index.catalog.is_text,
        trie_bytes=index.nbytes,
        bytes_per_item=index.nbytes / max(items, 1),
        floor_bytes_per_item=floor_bytes(index.codebook_sizes, leaves) / max(items, 1),
        item_bytes=sum(a.nbytes for a in index.item_tensors().values()),
        set_bytes=sum(a.nbytes for a in index.set_tensors().values()),
        colliding_items=sum(int(size) * count for size, count in items_per_leaf.items() if size != "1"),
        largest_collision=max(map(int, items_per_leaf), default=0),
        items_per_leaf=items_per_leaf,
        sets=index.sets.sizes(),
        levels=tuple(_levels(index)),
    )


def human_bytes(count: float) -> str:
    """1536 -> 1.5 KB."""
    if count < 1000:
        return f"{int(count)} B"
    power = min(int(math.log10(count) // 3), 4)
    return f"{count / 1000**power:.3g} {' KMGT'[power]}B"


def floor_bytes(codebook_sizes: tuple[int, ...], leaves: int) -> float:
    """Bytes that an exact set of `leaves` semantic IDs needs at least: log2 of how many such sets there are, over 8."""
    possible = math.prod(codebook_sizes)
    if leaves == 0 or leaves >= possible:
        return 0.0
    if possible < 2**50:
        bits = (math.lgamma(possible + 1) - math.lgamma(leaves + 1) - math.lgamma(possible - leaves + 1)) / math.log(2)
    else:  # the difference of the two large terms would drown in rounding; their quotient is n ln(possible) to 1e-6
        bits = leaves * math.log2(possible) - math.lgamma(leaves + 1) / math.log(2)
    return max(bits, 0.0) / 8


def _levels(index: StaticIndex) -> list[LevelStats]:
    stats = []
    opens = np.zeros(0, np.bool_)
    for level in range(index.num_levels):
        in_tail = level >= index.head_levels
        if in_tail:
            codes = index.tail[level - index.head_levels]
            if level == index.head_levels:
                opens = np.zeros(index.num_leaves + 1, np.bool_)
                opens[index.row_ptr[level]] = True
                opens = opens[:-1]
            fan_outs, edges = _tail_fan_outs(codes, opens, index.width(level))
        else:
            codes = index.codes[level]
            fan_outs = np.bincount(np.diff(index.row_ptr[level]))
            edges = len(codes)
        nbytes = codes.nbytes + (index.row_ptr[level].nbytes if level < len(index.row_ptr) else 0)
        states = int(fan_outs[1:].sum())
        reached = np.cumsum(fan_outs[1:])
        used = np.bincount(codes, minlength=1)[: index.codebook_sizes[level]] if len(codes) else np.zeros(1)
        stats.append(
            LevelStats(
                codebook_size=index.codebook_sizes[level],
                codes_used=int(np.count_nonzero(used)),
                states=states,
                edges=int(edges),
                mean_fan_out=int(edges) / max(states, 1),
                p99_fan_out=int(np.searchsorted(reached, 0.99 * states)) + 1 if states else 0,
                largest_fan_out=len(fan_outs) - 1 if states else 0,
                stored_as="tail" if in_tail else "trie",
                nbytes=nbytes,
            )
        )
    return stats


def _tail_fan_outs(codes: np.ndarray, opens: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    """How many states have each fan-out, and all edges; `opens` becomes the first leaves of the next level's states."""
    histogram = np.zeros(width + 1, np.int64)
    edges = _count_fan_outs(codes, opens, histogram)
    return histogram[: int(np.flatnonzero(histogram).max(initial=0)) + 1], edges


@cached_njit(nogil=True)
def _count_fan_outs(codes, opens, histogram):
    edges, fan_out = 0, 0
    for leaf in range(len(codes)):
        if opens[leaf]:
            if fan_out:
                histogram[fan_out] += 1
            fan_out = 0
        if opens[leaf] or codes[leaf] != codes[leaf - 1]:
            opens[leaf] = True
            fan_out += 1
            edges += 1
    if fan_out:
        histogram[fan_out] += 1
    return edges
