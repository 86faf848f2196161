"""A new bundle with other named sets and nothing else new: stock and freshness change in minutes, models do not."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from trieton.bundle import INDEX_FILES, RETRIEVER, Bundle
from trieton.constraint.expressions import ConstraintError, check_names, parse
from trieton.index.named_sets import NamedSets
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
        num_rows, num_unknown, num_missing: of the table, see `SetTable`.
        linked_bytes, copied_bytes: of the files taken over from the old bundle.
    """

    bundle_id: str
    sets: dict[str, int]
    num_rows: int
    num_unknown: int
    num_missing: int
    linked_bytes: int
    copied_bytes: int


def refresh(
    bundle_dir: str | Path,
    sets_path: str | Path,
    out_dir: str | Path,
    *,
    keep: bool = False,
    id_column: str = "item_id",
) -> Refreshed:
    """Write a bundle with the trie, items and retriever of `bundle_dir` and the named sets of a table.

    Files taken over are hard links where the filesystem allows, else copies. The new directory appears whole or not at
    all, and the old bundle is left as it is.

    Args:
        bundle_dir: a bundle, published or not; it is verified first.
        sets_path: the table, see `trieton_builder.catalogue.set_table.read_set_table`.
        out_dir: the new bundle; it must not exist.
        keep: keep the old bundle's sets that the table does not name. Otherwise the new bundle has the table's alone.

    Raises:
        BundleError: the old bundle is damaged.
        ValueError: a fault in the table, or none of its items is in the bundle; `out_dir` lies inside a bundle or a
            model repository; a constraint of the old bundle names a set that the new one would not have.
        FileExistsError: `out_dir` exists.
    """
    out_dir = Path(out_dir)
    refuse_inside(out_dir)
    bundle = Bundle.open(bundle_dir)
    table = read_set_table(sets_path, bundle.index, id_column=id_column)
    if table.num_unknown == table.num_rows:
        # Most likely another shop's table or an export that failed; as sets, it would take every item away.
        raise ValueError(f"{sets_path}: none of its {table.num_rows} rows names an item of {bundle_dir}; not refreshed")
    stored = {**(bundle.index.sets.stored if keep else {}), **table.sets.stored}
    sets = NamedSets(bundle.index.num_items, dict(sorted(stored.items())))
    base, expressions = bundle.manifest.get("base_constraint"), bundle.manifest.get("expressions", [])
    _check_constraints([*([base] if base else []), *expressions], sets)
    index = replace(bundle.index, sets=sets)
    provenance = dict(bundle.manifest.get("provenance", {}))
    # The first ancestor, so that the same sets give the same bundle whichever refresh they started from.
    provenance.setdefault("refreshed_from", bundle.bundle_id)
    moved = {"linked": 0, "copied": 0}

    def fill(directory: Path) -> None:
        kept = [bundle.path / TRIE_FILE, bundle.path / ITEM_FILE]
        for source in [*kept, *(p for p in sorted((bundle.path / RETRIEVER).rglob("*")) if p.is_file())]:
            target = directory / source.relative_to(bundle.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            moved[link_or_copy(source, target)] += source.stat().st_size
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
        table.num_rows,
        table.num_unknown,
        table.num_missing,
        linked_bytes=moved["linked"],
        copied_bytes=moved["copied"],
    )


def link_or_copy(source: Path, target: Path) -> str:
    """Make `target` the same file as `source`, or a copy where the filesystem has no hard links; says which."""
    try:
        os.link(source, target)
    except OSError:
        # Another filesystem, one without links, or too many links: a copy serves just as well.
        shutil.copy2(source, target)
        return "copied"
    return "linked"


def _check_constraints(texts: Iterable[str], sets: NamedSets) -> None:
    for text in texts:
        try:
            check_names(text, parse(text), sets)
        except ConstraintError as error:
            raise ValueError(
                f"the bundle's own constraint {text!r} needs sets that the table does not have ({error}); "
                "add them to the table, or keep the old bundle's sets"
            ) from None
