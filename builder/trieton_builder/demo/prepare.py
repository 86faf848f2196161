"""From raw files to two bundles: read, vectors, semantic IDs, training, export, index."""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from trieton.index.static_index import StaticIndex

from trieton_builder.bundle.write import write_bundle
from trieton_builder.catalogue.semantic_ids import SemanticIds, semantic_ids
from trieton_builder.demo.movielens import WHEEL, MovieLens, load_movielens
from trieton_builder.demo.stages import Stages
from trieton_builder.demo.train import Recipe, demo_prompt, load_model, train_retriever
from trieton_builder.demo.vectors import item_vectors
from trieton_builder.export import export_retriever
from trieton_builder.indexing.trie import build_index

CODEBOOK_SIZES = (32, 32, 32)  # and a last level that separates collisions
NEWEST = "newest"  # what version 2 is held to


@dataclass(frozen=True)
class Prepared:
    """Everything the demo shows, ready to be published.

    Attributes:
        data: people and films.
        ids: the films' semantic IDs.
        bundles: bundle directories of version 1 (all films) and version 2 (only the newest may be answered).
    """

    data: MovieLens
    ids: SemanticIds
    bundles: tuple[Path, Path]


def prepare(workdir: Path, stages: Stages, recipe: Recipe) -> Prepared:
    """Make both bundles in `workdir`. A trained model and its export are used again while their inputs are the same."""
    with stages("read MovieLens-100k"):
        data = load_movielens()
    with stages("make item vectors and semantic IDs"):
        ids = semantic_ids(item_vectors(data), CODEBOOK_SIZES)
    checkpoint, retriever = workdir / "checkpoint", workdir / "retriever"
    with stages("train the retriever (T5, from scratch)") as progress:
        trained = train_retriever(data, ids, checkpoint, recipe=recipe, progress=progress)
    weights = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    source = workdir / "retriever.source"  # which weights the export was made from
    with stages("export it to ONNX and compare with PyTorch"):
        if trained or not retriever.is_dir() or not source.is_file() or source.read_text() != weights:
            export = export_retriever(load_model(checkpoint), retriever, demo_prompt(ids, recipe), overwrite=True)
            stages.console.print(f"  largest difference of a log-probability: {export.largest_difference:.1e}")
            source.write_text(weights)
    with stages("build the index and write two bundles"):
        index = build_index(ids.codes, codebook_sizes=ids.codebook_sizes, item_ids=data.item_ids, sets=data.sets())
        bundles = (
            _write(workdir / "bundles" / "all-films", index, retriever, weights, None),
            _write(workdir / "bundles" / "newest-films", index, retriever, weights, NEWEST),
        )
    return Prepared(data, ids, bundles)


def _write(out_dir: Path, index: StaticIndex, retriever: Path, weights: str, base_constraint: str | None) -> Path:
    shutil.rmtree(out_dir, ignore_errors=True)
    provenance = {"data": f"MovieLens-100k from {WHEEL}", "checkpoint_sha256": weights}
    write_bundle(out_dir, index=index, retriever_dir=retriever, provenance=provenance, base_constraint=base_constraint)
    return out_dir
