"""Writing a bundle: index + item table + named sets + exported retriever in one immutable directory."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trieton.bundle import (
    BYTECODE,
    FORMAT,
    FORMAT_VERSION,
    INDEX_FILES,
    MANIFEST,
    RETRIEVER,
    Bundle,
    check_fit,
    compute_bundle_id,
    describe_file,
)
from trieton.constraint.compile import compile_constraint
from trieton.constraint.expressions import parse
from trieton.index.static_index import StaticIndex
from trieton.retriever.session import RetrieverSpec

from trieton_builder.files.whole_directory import whole_directory

MODEL_PY = '''"""Entry point of this version for the Python backend; everything it does is in the trieton package."""

from trieton.serving import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def write_bundle(
    out_dir: str | Path,
    *,
    index: StaticIndex,
    retriever_dir: str | Path,
    provenance: Mapping[str, Any] | None = None,
    base_constraint: str | None = None,
    expressions: Sequence[str] = (),
) -> str:
    """Write a bundle into the new directory `out_dir` and return its id. It appears whole or not at all.

    Args:
        retriever_dir: an exported retriever, as `trieton export` writes it.
        provenance: how the bundle was made (inputs, their checksums, options): JSON values without clock times, because
            the same input gives the same bundle id.
        base_constraint: an expression over the named sets that every request is held to, whatever it asks for itself.
            The whole catalogue stays known (a history may name any item), only what may be answered is less.
        expressions: constraints that the server compiles when it loads the version.

    Raises:
        BundleError: index and retriever do not fit each other.
        ValueError: an expression that this index cannot compile, a base constraint that allows no item, or a retriever
            whose files are not those exported.
        FileExistsError: `out_dir` exists.
    """
    out_dir, retriever_dir = Path(out_dir), Path(retriever_dir)
    spec = RetrieverSpec.load(retriever_dir)
    check_fit(index, spec)
    spec.check_files(retriever_dir)
    for expression in expressions:
        compile_constraint(index, expression)

    def fill(directory: Path) -> None:
        shutil.copytree(retriever_dir, directory / RETRIEVER)
        index.save_parts(*(directory / name for name in INDEX_FILES))

    fields = {
        "provenance": dict(provenance or {}),
        "base_constraint": base_constraint,
        "expressions": list(expressions),
    }
    return assemble(out_dir, fill, index, spec, fields)


def assemble(
    out_dir: Path,
    fill: Callable[[Path], None],
    index: StaticIndex,
    spec: RetrieverSpec,
    fields: Mapping[str, Any],
) -> str:
    """Let `fill(directory)` put the parts into a partial directory, describe them, verify, and rename it to `out_dir`.

    `fields` are the manifest's entries that cannot be read off the parts: provenance, base_constraint, expressions.

    Raises:
        ValueError: the base constraint allows no item.
        FileExistsError: `out_dir` exists.
    """
    check_base(index, fields.get("base_constraint"))
    if out_dir.exists():
        raise FileExistsError(f"{out_dir}: exists already; a bundle is never changed, choose another directory")
    with whole_directory(out_dir) as partial:
        fill(partial)
        (partial / "model.py").write_text(MODEL_PY)
        # A file where Python would make a folder for bytecode: the stub ignores PYTHONDONTWRITEBYTECODE, and a
        # file that appears in a version makes the server initialise that version again at the next load.
        (partial / BYTECODE).write_text("A file, so that no folder of bytecode appears here.\n")
        files = sorted(p for p in partial.rglob("*") if p.is_file())
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "index": {
                "codebook_sizes": list(index.codebook_sizes),
                "has_end": index.has_end,
                "num_leaves": index.num_leaves,
                "num_items": index.num_items,
                "item_ids": "string" if index.catalog.is_text else "int64",
            },
            "sets": index.sets.sizes(),
            "retriever": spec.to_json(),
            **fields,
            "files": {str(p.relative_to(partial)): describe_file(p) for p in files},
        }
        manifest["bundle_id"] = compute_bundle_id(manifest)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        Bundle.open(partial, verify=False)
    return manifest["bundle_id"]


def check_base(index: StaticIndex, base: str | None) -> None:
    """Refuse a base constraint that allows no item of the index: every answer would be empty.

    Raises:
        ValueError: names the sets of the constraint that have no item.
    """
    if base is None:
        return
    compile_constraint(index, base)  # says what is wrong with one that cannot be read
    expression = parse(base)
    if expression.evaluate(index.sets, index.num_items).any():
        return
    empty = sorted(name for name in expression.names() if not index.sets.sizes().get(name))
    raise ValueError(
        f"the base constraint {base!r} allows none of the {index.num_items} items, so every answer would be empty"
        + (f"; empty sets: {', '.join(empty)}" if empty else "")
    )
