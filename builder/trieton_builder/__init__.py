"""The offline part of Trieton: catalogue and model -> bundle -> repository, and the `trieton` command.

from trieton_builder import build_index, export_retriever, publish, write_bundle
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trieton_builder.bundle.write import write_bundle
    from trieton_builder.export import export_retriever
    from trieton_builder.indexing.build_file import build_file
    from trieton_builder.indexing.trie import build_index
    from trieton_builder.rollout import publish, rollback

__all__ = ["build_file", "build_index", "export_retriever", "publish", "rollback", "write_bundle"]

_HOMES = {
    "build_file": "indexing.build_file",
    "build_index": "indexing.trie",
    "export_retriever": "export",
    "publish": "rollout",
    "rollback": "rollout",
    "write_bundle": "bundle.write",
}


def __getattr__(name: str) -> Any:
    """Import a name's module at its first use: a build needs no exporter and a rollback none of both."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
