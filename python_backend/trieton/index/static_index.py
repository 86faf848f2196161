"""The STATIC index: a trie over semantic IDs as flat tensors, stored level by level.

Source of the idea: Su et al., arXiv 2602.22647, which stores a trie as CSR with an explicit next state per edge. Here
edges of a level are numbered in lexicographic order and each edge opens exactly one state, so **the next state of an
edge is the edge's own number** and no next-state array exists. Deep levels, where nearly every state is a single chain,
are not a trie at all: a state is a span of leaves and its codes are read from a code matrix (the tail).

Walking the index needs one notion only, the *span*: every live prefix is a range [lo, hi) of candidates at its level.

    head level l < head_levels:  candidates are edges; edge e has code codes[l][e] and leads to the span
                                 row_ptr[l + 1][e] .. row_ptr[l + 1][e + 1] (to leaf e when there is no level below)
    tail level l >= head_levels: candidates are leaves; neighbours with equal tail[l - head_levels] are one edge, and
                                 that run of leaves is the span it leads to
    root span:                   row_ptr[0][0] .. row_ptr[0][1]
    after the last level:        the span is a single leaf = the rank of the semantic ID
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from trieton.index.catalog import Catalog, check_offsets, span_of
from trieton.index.named_sets import NamedSets
from trieton.index.static_layout import StaticLayout, to_static
from trieton.index.tensorfile import DamagedFileError, read_tensors, write_tensors

KIND = "trieton-index"


def file_metadata(spec: dict) -> dict[str, str]:
    """The header entries of an index file whose tensors `StaticIndex.from_tensors` reads with `spec`."""
    return {"spec": json.dumps(spec, sort_keys=True)}


@dataclass(frozen=True, eq=False)
class StaticIndex:
    """Frozen tensors of one version's trie, with its item table and named sets.

    Attributes:
        codebook_sizes: codes of each level are 0 <= code < codebook_sizes[level].
        has_end: semantic IDs differ in length. A shorter one ends with the end code `codebook_sizes[level]`, an extra
            column after the codes of every level but the first; behind it the same code fills the row.
        codes: per head level the code of each edge, smallest unsigned type, [num_edges(level)].
        row_ptr: per head level the first edge of each state, [num_states + 1]; one more entry, the first leaf of each
            state, where a tail follows.
        tail: codes of the tail levels, [num_levels - head_levels, num_leaves].
        catalog: items by leaf.
        sets: named sets over the items.
    """

    codebook_sizes: tuple[int, ...]
    has_end: bool
    codes: tuple[np.ndarray, ...]
    row_ptr: tuple[np.ndarray, ...]
    tail: np.ndarray
    catalog: Catalog
    sets: NamedSets

    # ---- shape

    @property
    def num_levels(self) -> int:
        return len(self.codebook_sizes)

    @property
    def head_levels(self) -> int:
        """Levels stored as a trie; the tail begins at this level."""
        return len(self.codes)

    @cached_property
    def num_leaves(self) -> int:
        return self.tail.shape[1] if self.head_levels < self.num_levels else len(self.codes[-1])

    @property
    def num_items(self) -> int:
        return self.catalog.num_items

    @property
    def nbytes(self) -> int:
        """Bytes of the trie itself, without item ids and named sets."""
        return sum(a.nbytes for a in (*self.codes, *self.row_ptr, self.tail))

    def width(self, level: int) -> int:
        """Columns that logits of `level` have: its codes, and the end code where a semantic ID may end."""
        return self.codebook_sizes[level] + (self.has_end and level > 0)

    def end_code(self, level: int) -> int:
        """The code that means "ended" at `level`; -1 where there is none."""
        return self.codebook_sizes[level] if self.has_end and level > 0 else -1

    # ---- walking

    def to_static(self, dense_layers: int) -> StaticLayout:
        """The layout of arXiv 2602.22647, see `trieton.index.static_layout`."""
        return to_static(self, dense_layers)

    def leaf_codes(self, leaves: np.ndarray) -> np.ndarray:
        """Semantic IDs int32 [len(leaves), num_levels] of `leaves`, -1 behind the end of a short one."""
        leaves = np.asarray(leaves, np.int64)
        out = np.empty((len(leaves), self.num_levels), np.int32)
        out[:, self.head_levels :] = self.tail[:, leaves].T
        edge = leaves
        if self.head_levels < self.num_levels and self.head_levels:
            edge = span_of(self.row_ptr[self.head_levels], leaves)
        for level in range(self.head_levels - 1, -1, -1):
            out[:, level] = self.codes[level][edge]
            edge = span_of(self.row_ptr[level], edge)
        if self.has_end:
            ends = np.array([self.end_code(level) for level in range(self.num_levels)])
            out[out == ends] = -1
        return out

    # ---- checking

    def validate(self) -> "StaticIndex":
        """Check the structure and return self: shapes, offsets and codes, not the order of the edges.

        Raises:
            ValueError: the first thing that is wrong, with its level.
        """
        with_tail = self.head_levels < self.num_levels
        if len(self.row_ptr) != self.head_levels + with_tail:
            raise ValueError(f"row_ptr: expected {self.head_levels + with_tail} arrays, got {len(self.row_ptr)}")
        if self.tail.ndim != 2 or self.tail.shape[0] != self.num_levels - self.head_levels:
            raise ValueError(f"tail: expected {self.num_levels - self.head_levels} levels, got shape {self.tail.shape}")
        below = [len(c) for c in self.codes] + ([self.num_leaves] if with_tail else [])
        states = 1
        for level, (ptr, count) in enumerate(zip(self.row_ptr, below, strict=True)):
            check_offsets(ptr, states, count, f"level {level}: state", allow_empty=count == 0)
            states = count
        for level in range(self.num_levels):
            held = self.codes[level] if level < self.head_levels else self.tail[level - self.head_levels]
            if held.dtype.kind != "u" or held.ndim != 1:
                raise ValueError(f"level {level}: expected a flat array of unsigned codes, got {held.dtype}")
            if held.size and int(held.max()) >= self.width(level):
                raise ValueError(f"level {level}: expected codes below {self.width(level)}, got {int(held.max())}")
        self.catalog.validate(self.num_leaves)
        self.sets.validate(self.num_items)
        return self

    # ---- files

    def save(self, path: str | Path) -> str:
        """Write everything into one file; returns its sha256."""
        return write_tensors(
            path, {**self.trie_tensors(), **self.item_tensors(), **self.set_tensors()}, self._metadata(), kind=KIND
        )

    def save_parts(self, trie: Path, items: Path, sets: Path) -> None:
        """Write trie, item table and named sets as three files, as a bundle has them; `load` takes all three.

        Separate, so that a refresh of the named sets links the other two instead of copying them.
        """
        for path, tensors in ((trie, self.trie_tensors()), (items, self.item_tensors())):
            write_tensors(path, tensors, self._metadata(), kind=KIND)
        self.save_sets(sets)

    def save_sets(self, path: Path) -> None:
        """Write the named sets alone, the third of `save_parts`."""
        write_tensors(path, self.set_tensors(), self._metadata(), kind=KIND)

    @classmethod
    def load(
        cls, path: str | Path | Iterable[str | Path], device: str = "cpu", *, verify: bool = True
    ) -> "StaticIndex":
        """Map an index from the file that `save` wrote, or from the parts that `save_parts` wrote.

        Args:
            device: where the search will run; tensors for an accelerator are copied there once, at the first search.
            verify: compare checksums, one pass over the files.

        Raises:
            DamagedFileError: truncated, altered, of another kind, or of a newer format version.
        """
        paths = [path] if isinstance(path, str | Path) else list(path)
        tensors: dict[str, np.ndarray] = {}
        spec: dict[str, str] | None = None
        for part in paths:
            held, metadata = read_tensors(part, kind=KIND, verify=verify)
            tensors |= held
            if spec is not None and spec.get("spec") != metadata.get("spec"):
                raise DamagedFileError(f"{part}: belongs to another index than {paths[0]}")
            spec = metadata
        if spec is None:
            raise ValueError("load: expected at least one file, got none")
        try:
            index = cls.from_tensors(tensors, json.loads(spec["spec"]))
            index.validate()
            if index._metadata() != {"spec": spec["spec"]}:
                raise ValueError(f"its tensors make {index._metadata()['spec']}, its header says {spec['spec']}")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFileError(f"{paths[0]}: not a usable index ({type(error).__name__}: {error})") from None
        if device != "cpu":
            object.__setattr__(index, "device", device)
        return index

    device = "cpu"

    def _metadata(self) -> dict[str, str]:
        return file_metadata(
            {
                "codebook_sizes": list(self.codebook_sizes),
                "has_end": self.has_end,
                "head_levels": self.head_levels,
                "num_items": self.num_items,
                "num_leaves": self.num_leaves,
                "text_ids": self.catalog.is_text,
            }
        )

    def trie_tensors(self) -> dict[str, np.ndarray]:
        """Tensors of the trie by the names they have in a file."""
        named = {f"trie.codes.{level}": a for level, a in enumerate(self.codes)}
        named |= {f"trie.row_ptr.{level}": a for level, a in enumerate(self.row_ptr)}
        return named | {"trie.tail": self.tail}

    def item_tensors(self) -> dict[str, np.ndarray]:
        """Tensors of the item table by the names they have in a file."""
        ids = self.catalog.item_ids
        named = {"items.ids": ids.view(np.uint8).reshape(len(ids), ids.itemsize) if self.catalog.is_text else ids}
        named["items.order"] = self.catalog.order
        if self.catalog.leaf_ptr is not None:
            named["items.leaf_ptr"] = self.catalog.leaf_ptr
        return named

    def set_tensors(self) -> dict[str, np.ndarray]:
        """Tensors of the named sets by the names they have in a file."""
        return {f"sets.{name}": held for name, held in self.sets.stored.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, np.ndarray], spec: dict) -> "StaticIndex":
        """The reverse of `trie_tensors`, `item_tensors` and `set_tensors`; `spec` as in a file's header."""
        levels, head = len(spec["codebook_sizes"]), spec["head_levels"]
        ids = tensors["items.ids"]
        if spec["text_ids"]:
            ids = ids.reshape(-1).view(f"S{ids.shape[1]}")
        return cls(
            codebook_sizes=tuple(spec["codebook_sizes"]),
            has_end=spec["has_end"],
            codes=tuple(tensors[f"trie.codes.{level}"] for level in range(head)),
            row_ptr=tuple(tensors[f"trie.row_ptr.{level}"] for level in range(head + (head < levels))),
            tail=tensors["trie.tail"],
            catalog=Catalog(ids, tensors["items.order"], tensors.get("items.leaf_ptr")),
            sets=NamedSets(spec["num_items"], {k[5:]: v for k, v in tensors.items() if k.startswith("sets.")}),
        )
