"""Export of Hugging Face models to the two graphs of a retriever, one file per model family."""

from trieton_builder.export.exporter import Export, export_retriever

__all__ = ["Export", "export_retriever"]
