"""An index file is the same for the same input, and refused when anything about it is wrong."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from test_index import catalogues
from trieton.index.static_index import StaticIndex
from trieton.index.tensorfile import DamagedFileError, TensorFileWriter, read_tensors, write_tensors
from trieton_builder.indexing.trie import build_index


def example(**options: object) -> StaticIndex:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 4, (60, 3))
    sets = {"fresh": rng.random(60) < 0.5, "rare": np.arange(60) == 3}
    return build_index(codes, codebook_sizes=[4] * 3, sets=sets, **options)


@settings(deadline=None, max_examples=60)
@given(catalogues())
def test_saving_and_loading_gives_the_same_bytes(tmp_path_factory: pytest.TempPathFactory, case: dict) -> None:
    folder = tmp_path_factory.mktemp("index")
    index = build_index(**case)
    digest = index.save(folder / "a")
    loaded = StaticIndex.load(folder / "a")
    assert loaded.save(folder / "b") == digest
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes()
    order = np.random.default_rng(0).permutation(len(case["codes"]))
    if case["item_ids"] is not None and index.num_leaves == index.num_items:  # then the order of rows leaves no trace
        lengths = None if case["lengths"] is None else case["lengths"][order]
        sets = {name: mask[order] for name, mask in case["sets"].items()}
        again = build_index(
            case["codes"][order],
            codebook_sizes=case["codebook_sizes"],
            item_ids=case["item_ids"][order],
            lengths=lengths,
            sets=sets,
        )
        assert again.save(folder / "c") == digest


def test_three_parts_load_as_one_and_strangers_are_refused(tmp_path: Path) -> None:
    index = example()
    parts = [tmp_path / name for name in ("trie", "items", "sets")]
    index.save_parts(*parts)
    loaded = StaticIndex.load(parts)
    assert loaded.save(tmp_path / "a") == index.save(tmp_path / "b")
    other = build_index(np.zeros((1, 3), np.int64), codebook_sizes=[4] * 3)
    strangers = [tmp_path / f"other-{name}" for name in ("trie", "items", "sets")]
    other.save_parts(*strangers)
    with pytest.raises(DamagedFileError, match="belongs to another index"):
        StaticIndex.load([parts[0], strangers[1], parts[2]])
    with pytest.raises(DamagedFileError, match="KeyError"):
        StaticIndex.load(parts[:1])
    with pytest.raises(ValueError, match="expected at least one file"):
        StaticIndex.load([])


def test_any_safetensors_reader_opens_the_file(tmp_path: Path) -> None:
    index = example()
    index.save(tmp_path / "index.safetensors")
    theirs = load_file(tmp_path / "index.safetensors")
    assert (theirs["trie.tail"] == index.tail).all()
    assert (theirs["items.order"] == index.catalog.order).all()


@pytest.mark.case("I15")
@pytest.mark.parametrize("item_ids", [None, [f"item {i}" for i in range(60)]])
def test_every_single_flipped_byte_is_noticed(tmp_path: Path, item_ids: list[str] | None) -> None:
    path = tmp_path / "index.safetensors"
    example(item_ids=item_ids).save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in range(len(whole)) if item_ids is None else range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        with pytest.raises(DamagedFileError, match=r"index\.safetensors"):
            StaticIndex.load(path)


@pytest.mark.case("I15")
def test_every_truncation_and_extension_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "index.safetensors"
    example().save(path)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 5), len(whole) - 1, len(whole) + 1, len(whole) + 4096]:
        path.write_bytes(whole[:length] + b"\0" * (length - len(whole)))
        for verify in (True, False):
            with pytest.raises(DamagedFileError):
                StaticIndex.load(path, verify=verify)


@pytest.mark.case("I15")
def test_a_newer_format_or_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.safetensors"
    with monkeypatch.context() as newer:
        newer.setattr("trieton.index.tensorfile.FORMAT_VERSION", 2)
        example().save(path)
    with pytest.raises(DamagedFileError, match="written by format version 2, this release reads up to 1"):
        StaticIndex.load(path)
    write_tensors(path, {}, {}, kind="something-else")
    with pytest.raises(DamagedFileError, match="expected a file of format 'trieton-index', got 'something-else'"):
        StaticIndex.load(path)


def _spec(index: StaticIndex, **changed: object) -> dict[str, str]:
    return {"spec": json.dumps({**json.loads(index._metadata()["spec"]), **changed}, sort_keys=True)}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("trie.row_ptr.0", lambda a: a[::-1].copy()),
        ("trie.tail", lambda a: a[:, :-1].copy()),
        ("trie.tail", lambda a: a + np.uint8(200)),
        ("items.ids", lambda a: a[:-1].copy()),
        ("items.order", lambda a: a + np.int32(1)),
        ("items.leaf_ptr", lambda a: a[:-1].copy()),
        ("items.leaf_ptr", lambda a: np.zeros_like(a)),
        ("sets.fresh", lambda a: a[:-1].copy()),
        ("sets.fresh", lambda a: a | np.uint8(255)),
        ("sets.rare", lambda a: a + np.int32(100)),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(tmp_path: Path, name: str, change) -> None:
    """Damage that the checksum covers, as a faulty writer would make it."""
    index = example()
    tensors = {**index.trie_tensors(), **index.item_tensors(), **index.set_tensors()}
    tensors[name] = change(tensors[name])
    write_tensors(tmp_path / "a", tensors, index._metadata(), kind="trieton-index")
    with pytest.raises(DamagedFileError, match="not a usable index"):
        StaticIndex.load(tmp_path / "a")


@pytest.mark.parametrize(
    "changed", [{"codebook_sizes": [4, 4]}, {"head_levels": 3}, {"text_ids": True}, {"num_items": 3}, {"has_end": True}]
)
def test_a_header_that_does_not_fit_the_tensors_is_refused(tmp_path: Path, changed: dict) -> None:
    index = example()
    tensors = {**index.trie_tensors(), **index.item_tensors(), **index.set_tensors()}
    write_tensors(tmp_path / "a", tensors, _spec(index, **changed), kind="trieton-index")
    if changed == {"has_end": True}:  # an index may allow ends and have none
        StaticIndex.load(tmp_path / "a")
        return
    with pytest.raises(DamagedFileError, match="not a usable index"):
        StaticIndex.load(tmp_path / "a")


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_never_an_index(tmp_path_factory: pytest.TempPathFactory, data: bytes, framed: bool) -> None:
    path = tmp_path_factory.mktemp("noise") / "noise"
    path.write_bytes(len(data).to_bytes(8, "little") + data if framed else data)
    with pytest.raises(DamagedFileError):
        StaticIndex.load(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "U8", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [1e400], "data_offsets": [0, 4]},
        {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "I32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [4], "data_offsets": [-4, 4]},
        {"dtype": "U8", "shape": [4], "data_offsets": [0, 1 << 70]},
        {"dtype": "U8", "shape": [4]},
        [],
        None,
    ],
)
def test_odd_headers_are_refused(tmp_path: Path, entry: object) -> None:
    metadata = {"format": "k", "format_version": "1", "sha256": "0" * 64}
    header = json.dumps({"__metadata__": metadata, "a": entry}).encode()
    (tmp_path / "odd").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(DamagedFileError, match="odd"):
        read_tensors(tmp_path / "odd", kind="k", verify=False)


def test_a_file_that_is_not_finished_never_appears(tmp_path: Path) -> None:
    path = tmp_path / "a"
    specs = {"x": (np.dtype(np.int64), (3,))}
    with TensorFileWriter(path, specs, {}, kind="k") as file:
        file.append("x", np.arange(2))
    assert os.listdir(tmp_path) == []
    with TensorFileWriter(path, specs, {}, kind="k") as file:
        file.append("x", np.arange(2))
        with pytest.raises(ValueError, match="8 bytes"):
            file.finish()
    with pytest.raises(ValueError, match="expected 24 bytes"), TensorFileWriter(path, specs, {}, kind="k") as file:
        file.append("x", np.arange(4))
    with pytest.raises(ValueError, match="expected int64"), TensorFileWriter(path, specs, {}, kind="k") as file:
        file.append("x", np.arange(3, dtype=np.int32))
    assert os.listdir(tmp_path) == []


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    digest = example().save(path)
    with pytest.raises(ValueError, match="complex128"):
        write_tensors(path, {"x": np.zeros(1, np.complex128)}, {}, kind="k")
    assert os.listdir(tmp_path) == ["a"]
    assert example().save(tmp_path / "b") == digest
