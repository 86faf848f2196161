"""A new bundle with other named sets and nothing else new: stock and freshness change in minutes, models do not."""

import os
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from trieton.bundle import INDEX_FILES, RETRIEVER, Bundle
from trieton.constraint.expressions import ConstraintError, check_names, parse
from trieton.index.named_sets import NamedSets, check_set_names, differ_in_case
from trieton.retriever.session import RetrieverSpec

from trieton_builder.bundle.protected import refuse_inside
from trieton_builder.bundle.write import assemble
from trieton_builder.catalogue.set_table import read_set_table

TRIE_FILE, ITEM_FILE, SET_FILE = INDEX_FILES


@dataclass(frozen=True)
class Refreshed:
    """What a refresh made.

    Attributes:
        bundle_id: of the new bundle.
        sets: its named sets, {name: items}.
        sets_before: those of the old bundle.
        kept_sets: old sets that the table does not name and that were kept.
        dropped_sets: old sets that the new bundle does not have; requests that name them will fail.
        similar_sets: groups of names that differ in upper and lower case only.
        base_constraint: the constraint that every request is held to, None without one.
        base_items_before, base_items: how many items it allows.
        num_rows, num_unknown, num_missing, unknown_ids, missing_ids, empty_columns: of the table, see `SetTable`.
        linked_bytes, copied_bytes: of the files taken over from the old bundle.
        copied_because: why files were copied and not linked, None where all were linked.
    """

    bundle_id: str
    sets: dict[str, int]
    sets_before: dict[str, int]
    kept_sets: list[str]
    dropped_sets: list[str]
    similar_sets: list[list[str]]
    base_constraint: str | None
    base_items_before: int | None
    base_items: int | None
    num_rows: int
    num_unknown: int
    num_missing: int
    unknown_ids: tuple[int | str, ...]
    missing_ids: tuple[int | str, ...]
    empty_columns: tuple[str, ...]
    linked_bytes: int
    copied_bytes: int
    copied_because: str | None


def refresh(
    bundle_dir: str | Path,
    sets_path: str | Path,
    out_dir: str | Path,
    *,
    keep_sets: bool = False,
    id_column: str = "item_id",
    set_names: Collection[str] = (),
    set_separator: str = "|",
) -> Refreshed:
    """Write a bundle with the trie, items and retriever of `bundle_dir` and the named sets of a table.

    Files taken over are hard links where the filesystem allows, else copies. The new directory appears whole or not at
    all, and the old bundle is left as it is.

    Args:
        bundle_dir: a bundle, published or not; it is verified first.
        sets_path: the table, see `trieton_builder.catalogue.set_table.read_set_table`.
        out_dir: the new bundle; it must not exist.
        keep_sets: keep the old bundle's sets that the table does not name. Otherwise the new bundle has the table's
            alone.
        id_column, set_names, set_separator: see `read_set_table`.

    Raises:
        BundleError: the old bundle is damaged.
        ValueError: a fault in the table, or none of its items is in the bundle; `out_dir` lies inside a bundle or a
            model repository; a constraint of the old bundle names a set that the new one would not have; the base
            constraint would allow no item.
        FileExistsError: `out_dir` exists.
    """
    out_dir = Path(out_dir)
    refuse_inside(out_dir)
    bundle = Bundle.open(bundle_dir)
    table = read_set_table(
        sets_path, bundle.index, id_column=id_column, set_names=set_names, set_separator=set_separator
    )
    if table.num_unknown == table.num_rows:
        # Most likely another shop's table or an export that failed; as sets, it would take every item away.
        raise ValueError(f"{sets_path}: none of its {table.num_rows} rows names an item of {bundle_dir}; not refreshed")
    old, new = bundle.index.sets, table.sets
    kept = sorted(set(old) - set(new)) if keep_sets else []
    stored = {**{name: old.stored[name] for name in kept}, **new.stored}
    try:
        check_set_names(stored)
    except ValueError as error:
        raise ValueError(f"{sets_path}, with the sets kept from {bundle_dir}: {error}") from None
    sets = NamedSets(bundle.index.num_items, dict(sorted(stored.items())))
    base, expressions = bundle.manifest.get("base_constraint"), bundle.manifest.get("expressions", [])
    _check_constraints([*([base] if base else []), *expressions], sets)
    base_before, base_after = (None, None) if not base else (_allowed(base, old), _allowed(base, sets))
    if base and not base_after:
        named = sorted(parse(base).names())
        counts = ", ".join(f"{name} {_size(old, name)} -> {_size(sets, name)}" for name in named)
        raise ValueError(
            f"{sets_path}: the bundle's base constraint {base!r} would allow no item (now {base_before:,}; {counts}), "
            "so every answer would be empty; not refreshed"
        )
    index = replace(bundle.index, sets=sets)
    provenance = dict(bundle.manifest.get("provenance", {}))
    # The first ancestor, so that the same sets give the same bundle whichever refresh they started from.
    provenance.setdefault("refreshed_from", bundle.bundle_id)
    moved = {"linked": 0, "copied": 0}
    reasons: list[str] = []

    def fill(directory: Path) -> None:
        kept = [bundle.path / TRIE_FILE, bundle.path / ITEM_FILE]
        for source in [*kept, *(p for p in sorted((bundle.path / RETRIEVER).rglob("*")) if p.is_file())]:
            target = directory / source.relative_to(bundle.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            reason = link_or_copy(source, target)
            moved["copied" if reason else "linked"] += source.stat().st_size
            reasons.extend([reason] if reason else [])
        index.save_sets(directory / SET_FILE)

    bundle_id = assemble(
        out_dir,
        fill,
        index,
        RetrieverSpec.load(bundle.path / RETRIEVER),
        {"provenance": provenance, "base_constraint": base, "expressions": list(expressions)},
    )
    return Refreshed(
        bundle_id,
        sets.sizes(),
        old.sizes(),
        kept,
        sorted(set(old) - set(sets)),
        differ_in_case(list(sets)),
        base,
        base_before,
        base_after,
        table.num_rows,
        table.num_unknown,
        table.num_missing,
        table.unknown_ids,
        table.missing_ids,
        table.empty_columns,
        linked_bytes=moved["linked"],
        copied_bytes=moved["copied"],
        copied_because=reasons[0] if reasons else None,
    )


def link_or_copy(source: Path, target: Path) -> str | None:
    """Make `target` the same file as `source`, or a copy where the filesystem has no hard links; then says why."""
    try:
        os.link(source, target)
    except OSError as error:
        # Another filesystem, one without links, or too many links: a copy serves just as well.
        shutil.copy2(source, target)
        return error.strerror or str(error)
    return None


def _allowed(text: str, sets: NamedSets) -> int:
    """How many items an expression allows, all of whose names are there; 0 where one is not."""
    expression = parse(text)
    if not expression.names() <= set(sets):
        return 0
    return int(np.unpackbits(expression.evaluate(sets, sets.num_items)).sum())


def _size(sets: NamedSets, name: str) -> str:
    return f"{int(np.unpackbits(sets[name]).sum()):,}" if name in sets else "none"


def _check_constraints(texts: Iterable[str], sets: NamedSets) -> None:
    for text in texts:
        try:
            check_names(text, parse(text), sets)
        except ConstraintError as error:
            raise ValueError(
                f"the bundle's own constraint {text!r} needs sets that the table does not have ({error}); add them to "
                "the table, where a column of 0 in every row is an empty set, or keep the old ones with --keep-sets"
            ) from None
