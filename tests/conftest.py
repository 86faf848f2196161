"""Fixtures shared by all tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trieton_builder.server.process import TritonServer


@pytest.fixture(scope="session")
def tiny_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported graphs of an untrained T5, exported once per session."""
    from tiny_retriever import export_tiny_graphs  # torch and transformers only where a test asks for them

    return export_tiny_graphs(tmp_path_factory.mktemp("graphs") / "retriever")


@pytest.fixture(scope="session")
def make_tiny_retriever(tiny_graphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_tiny_retriever(codebook_sizes, has_end=False, max_items=10)`: a new retriever directory in milliseconds."""
    from tiny_retriever import tiny_retriever

    def make(codebook_sizes: tuple[int, ...], *, has_end: bool = False, max_items: int = 10) -> Path:
        out_dir = tmp_path_factory.mktemp("tiny") / "retriever"
        return tiny_retriever(tiny_graphs, out_dir, codebook_sizes, has_end=has_end, max_items=max_items)

    return make


@pytest.fixture(scope="session")
def tiny_retriever_dir(make_tiny_retriever: Callable[..., Path]) -> Path:
    """A retriever with codebook sizes (8, 8, 8)."""
    return make_tiny_retriever((8, 8, 8))


@pytest.fixture(scope="session")
def make_tiny_bundle(
    make_tiny_retriever: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`make_tiny_bundle(seed=0, text_ids=False, num_items=300, **options of write_bundle)`: a whole bundle on disk.

    Item ids are 1000, 1001, ... (or "item-1000", ...) in the order of `tiny_catalogue(seed, num_items)`; about a third
    of the items share their semantic ID with another; sets: even, third, rare (1 in 50), none_at_all.
    """
    from tiny_bundle import write_tiny_bundle

    def make(*, seed: int = 0, text_ids: bool = False, num_items: int = 300, **options: object) -> Path:
        out_dir = tmp_path_factory.mktemp("bundle") / "bundle"
        write_tiny_bundle(out_dir, make_tiny_retriever, seed=seed, text_ids=text_ids, num_items=num_items, **options)
        return out_dir

    return make


@pytest.fixture(scope="session")
def tiny_bundle(make_tiny_bundle: Callable[..., Path]) -> Path:
    """The bundle that most tests of the search and the server share. Never change it."""
    return make_tiny_bundle(expressions=("even and not rare",))


@pytest.fixture(scope="session")
def served(
    tiny_bundle: Path,
    make_tiny_bundle: Callable[..., Path],
    make_tiny_retriever: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> "Iterator[TritonServer]":
    """The real server, shared by all tests that leave it as it was. It has four models:

    `generative_retriever` with the bundle of `tiny_bundle`, `text_retriever` with the same items under string ids,
    `slow_retriever` whose large requests take long, and the ensemble `recommend`.
    """
    import shutil

    from tiny_bundle import write_slow_bundle
    from trieton_builder.bundle.model_config import ENSEMBLE_NAME, MODEL_NAME, render_config, render_ensemble_config
    from trieton_builder.server.process import TritonServer

    repository = tmp_path_factory.mktemp("served")
    models = {MODEL_NAME: tiny_bundle, "text_retriever": make_tiny_bundle(text_ids=True), "slow_retriever": None}
    for name, bundle in models.items():
        folder = repository / name
        folder.mkdir()
        (folder / "config.pbtxt").write_text(render_config(name=name, text_ids=name == "text_retriever"))
        if bundle is None:
            write_slow_bundle(folder / "1", make_tiny_retriever)
        else:
            shutil.copytree(bundle, folder / "1")
    ensemble = repository / ENSEMBLE_NAME
    (ensemble / "1").mkdir(parents=True)
    (ensemble / "config.pbtxt").write_text(render_ensemble_config())
    with TritonServer(repository, load=(*models, ENSEMBLE_NAME)) as server:
        yield server


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """One thread for PyTorch: on a busy machine the threads of tiny operators mostly wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
