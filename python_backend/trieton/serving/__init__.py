"""The model that the server loads: requests -> tensors, metrics, traces."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trieton.serving.model import TritonPythonModel

__all__ = ["TritonPythonModel"]


def __getattr__(name: str) -> Any:
    # Published bundles import the class from here. Lazily, because the module needs the server's stub, and its other
    # neighbours in this package do not.
    if name == "TritonPythonModel":
        from trieton.serving.model import TritonPythonModel

        return TritonPythonModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
