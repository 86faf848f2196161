"""Export of Hugging Face models to the two graphs of a retriever, one file per model family."""

from trieton_builder.export.exporter import FAMILIES, Export, export_retriever
from trieton_builder.export.family import ExportError

__all__ = ["FAMILIES", "Export", "ExportError", "export_retriever"]
