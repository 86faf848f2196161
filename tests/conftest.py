"""Fixtures shared by all tests."""

from collections.abc import Callable
from pathlib import Path

import pytest


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
