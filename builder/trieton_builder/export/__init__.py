"""Export of retrievers to ONNX, one file per model family."""
