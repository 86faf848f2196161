"""A bundle is whole, fits together and is what its manifest says, or it is refused."""

import json
import shutil

import numpy as np
import pytest
from trieton.bundle import Bundle, BundleError, compute_bundle_id
from trieton.retriever.session import RetrieverSpec
from trieton_builder.bundle.write import write_bundle
from trieton_builder.indexing.trie import build_index


def index_for(retriever_dir, *, shrink=0, **options):
    sizes = [s - shrink for s in RetrieverSpec.load(retriever_dir).token_map.sizes]
    codes = np.random.default_rng(0).integers(0, sizes, (50, len(sizes)))
    masks = {"even": np.arange(50) % 2 == 0}
    return build_index(codes, codebook_sizes=sizes, item_ids=np.arange(100, 150), sets=masks, **options)


@pytest.fixture
def bundle_dir(tiny_retriever_dir, tmp_path):
    write_bundle(tmp_path / "bundle", index=index_for(tiny_retriever_dir), retriever_dir=tiny_retriever_dir)
    return tmp_path / "bundle"


def test_a_bundle_opens_with_everything_it_was_given(bundle_dir):
    bundle = Bundle.open(bundle_dir)
    assert bundle.index.num_items == 50
    assert bundle.manifest["sets"] == {"even": 25}
    assert bundle.bundle_id == compute_bundle_id(bundle.manifest)
    assert bundle.load_retriever(threads=1).spec.token_map.sizes == bundle.index.codebook_sizes


def test_the_same_input_gives_the_same_bundle_and_another_input_another_id(tiny_retriever_dir, tmp_path):
    index = index_for(tiny_retriever_dir)
    first, second, third = (
        write_bundle(tmp_path / name, index=index, retriever_dir=tiny_retriever_dir, base_constraint=base)
        for name, base in (("a", None), ("b", None), ("c", "even"))
    )
    assert first == second != third
    files = [p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file()]
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


def test_every_altered_missing_or_added_file_is_refused_by_name(bundle_dir, tmp_path):
    for file in sorted(p.relative_to(bundle_dir) for p in bundle_dir.rglob("*") if p.is_file()):
        damaged = tmp_path / "damaged"
        shutil.copytree(bundle_dir, damaged)
        content = bytearray((damaged / file).read_bytes())
        content[len(content) // 2] ^= 1
        (damaged / file).write_bytes(content)
        with pytest.raises(BundleError, match=file.name):
            Bundle.open(damaged)
        (damaged / file).unlink()
        with pytest.raises(BundleError, match=file.name):
            Bundle.open(damaged)
        shutil.rmtree(damaged)
    (bundle_dir / "stray.bin").write_bytes(b"x")
    with pytest.raises(BundleError, match=r"stray\.bin"):
        Bundle.open(bundle_dir)


@pytest.mark.parametrize("damage", ["edited", "cut", "missing", "stray"])
def test_a_retriever_that_is_not_what_was_exported_makes_no_bundle(damage, tiny_retriever_dir, tmp_path):
    folder = tmp_path / "retriever"
    shutil.copytree(tiny_retriever_dir, folder)
    graph, spec = folder / "decode.onnx", folder / "retriever.json"
    if damage == "edited":
        spec.write_text(json.dumps({**json.loads(spec.read_text()), "normalise": "level"}))
    elif damage == "cut":
        graph.write_bytes(graph.read_bytes()[:-1])
    elif damage == "missing":
        graph.unlink()
    else:
        (folder / "cache").mkdir()
    with pytest.raises(ValueError, match=r"retriever: retriever\.json and what lies beside it .*fingerprint differs"):
        write_bundle(tmp_path / "b", index=index_for(folder), retriever_dir=folder)
    assert not (tmp_path / "b").exists()


@pytest.mark.case("R02")
def test_an_index_of_other_codebook_sizes_than_its_retriever_is_refused_before_anything_is_written(
    tiny_retriever_dir, tmp_path
):
    with pytest.raises(BundleError, match="codebook sizes"):
        write_bundle(tmp_path / "b", index=index_for(tiny_retriever_dir, shrink=1), retriever_dir=tiny_retriever_dir)
    assert list(tmp_path.iterdir()) == []


def test_a_constraint_over_an_unknown_set_is_refused_before_anything_is_written(tiny_retriever_dir, tmp_path):
    with pytest.raises(ValueError, match="odd"):
        write_bundle(
            tmp_path / "b",
            index=index_for(tiny_retriever_dir),
            retriever_dir=tiny_retriever_dir,
            base_constraint="odd",
        )
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_never_overwritten(bundle_dir, tiny_retriever_dir):
    before = (bundle_dir / "manifest.json").read_bytes()
    with pytest.raises(FileExistsError):
        write_bundle(bundle_dir, index=index_for(tiny_retriever_dir), retriever_dir=tiny_retriever_dir)
    assert (bundle_dir / "manifest.json").read_bytes() == before


def test_a_bundle_of_a_newer_format_is_refused_with_what_to_do(bundle_dir):
    manifest = json.loads((bundle_dir / "manifest.json").read_text())
    manifest["format_version"] = 99
    (bundle_dir / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="upgrade"):
        Bundle.open(bundle_dir)
