"""The part of Trieton that runs inside the server: index, constraints, beam search, retriever, serving.

from trieton import StaticIndex, beam_search, compile_constraint
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trieton.bundle import Bundle
    from trieton.constraint.compile import compile_constraint
    from trieton.index.static_index import StaticIndex
    from trieton.search.beam import beam_search
    from trieton.search.query import Query
    from trieton.search.searcher import Searcher

__all__ = ["Bundle", "Query", "Searcher", "StaticIndex", "beam_search", "compile_constraint"]

_HOMES = {
    "Bundle": "bundle",
    "Query": "search.query",
    "Searcher": "search.searcher",
    "StaticIndex": "index.static_index",
    "beam_search": "search.beam",
    "compile_constraint": "constraint.compile",
}


def __getattr__(name: str) -> Any:
    """Import a name's module at its first use: a version loads what it needs and nothing else."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
