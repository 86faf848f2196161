"""Moving an exported retriever into the server: its graphs as two models, and a retriever that asks them.

The engine is `trieton.retriever.bls`. With the ONNX backend (NGC containers) a model is the graph itself; a server
without that backend, such as the one in the wheel, runs it in a few lines of Python.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
from trieton.retriever.bls import MODELS_FILE
from trieton.retriever.session import RetrieverSpec

GRAPHS = ("prefill", "decode")
_TYPES = {
    onnx.TensorProto.FLOAT: "TYPE_FP32",
    onnx.TensorProto.FLOAT16: "TYPE_FP16",
    onnx.TensorProto.INT64: "TYPE_INT64",
}
_MODEL_PY = '''"""One exported graph as a model of the server."""

from trieton.graph_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def write_graph_models(
    retriever_dir: str | Path, repository: str | Path, *, prefix: str = "retriever", version: int = 1, backend: str
) -> None:
    """Put `prefill.onnx` and `decode.onnx` into a model repository as `{prefix}_prefill` and `{prefix}_decode`.

    Args:
        backend: "onnxruntime" for servers with the ONNX backend, "python" for those without.

    Raises:
        ValueError: another backend, or a tensor of a type that the server's models cannot have.
        FileExistsError: such a version is there already.
    """
    if backend not in ("onnxruntime", "python"):
        raise ValueError(f"backend: expected 'onnxruntime' or 'python', got {backend!r}")
    retriever_dir, repository = Path(retriever_dir), Path(repository)
    models = [(graph, f"{prefix}_{graph}") for graph in GRAPHS]
    configs = {graph: _config(retriever_dir / f"{graph}.onnx", name, backend) for graph, name in models}
    for graph, name in models:
        folder = repository / name / str(version)
        folder.mkdir(parents=True)
        shutil.copyfile(retriever_dir / f"{graph}.onnx", folder / "model.onnx")
        for file in retriever_dir.glob(f"{graph}.onnx?*"):  # weights beside the graph, which names the file
            shutil.copyfile(file, folder / file.name)
        if backend == "python":
            (folder / "model.py").write_text(_MODEL_PY)
        (repository / name / "config.pbtxt").write_text(configs[graph])


def write_bls_retriever(
    retriever_dir: str | Path, out_dir: str | Path, *, prefix: str = "retriever", version: int = 1
) -> RetrieverSpec:
    """Write a retriever directory whose engine asks `{prefix}_prefill` and `{prefix}_decode` of exactly `version`.

    It stands in place of the exported one when a bundle is written. Its fingerprint covers the graphs it came from.

    Raises:
        FileExistsError: `out_dir` exists.
    """
    retriever_dir, out_dir = Path(retriever_dir), Path(out_dir)
    spec = RetrieverSpec.load(retriever_dir)
    out_dir.mkdir(parents=True)
    graphs = [retriever_dir / f"{graph}.onnx" for graph in GRAPHS]
    models = {
        graph: {"model": f"{prefix}_{graph}", "version": version, "outputs": _names(retriever_dir / f"{graph}.onnx")}
        for graph in GRAPHS
    }
    (out_dir / MODELS_FILE).write_text(json.dumps(models, indent=1) + "\n")
    return replace(spec, engine="bls").save(out_dir, graphs)


def _names(graph: Path) -> list[str]:
    return [value.name for value in onnx.load(graph, load_external_data=False).graph.output]


def _config(file: Path, name: str, backend: str) -> str:
    graph = onnx.load(file, load_external_data=False).graph
    lines = [
        "# Written by trieton_builder.bundle.bls. No batching: the search that asks is a batch already.",
        f'name: "{name}"',
        f'backend: "{backend}"',
        "max_batch_size: 0",
    ]
    for kind, values in (("input", graph.input), ("output", graph.output)):
        entries = []
        for value in values:
            tensor = value.type.tensor_type
            if tensor.elem_type not in _TYPES:
                raise ValueError(f"{file}: {value.name}: type {tensor.elem_type} has no place in a served model")
            dims = ", ".join("-1" if d.dim_param or not d.dim_value else str(d.dim_value) for d in tensor.shape.dim)
            entries.append(f'  {{ name: "{value.name}" data_type: {_TYPES[tensor.elem_type]} dims: [ {dims} ] }}')
        lines += [f"{kind} [", ",\n".join(entries), "]"]
    # Versions are named by those who ask; the ones still asked for must stay.
    lines.append("version_policy: { all { } }")
    return "\n".join(lines) + "\n"
