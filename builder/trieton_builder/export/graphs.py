"""Modules -> graphs with dynamic batch, prompt length, beams and suffix, as ONNX or as `torch.export` programs."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir
import torch
from torch import Tensor, nn

from trieton_builder.export.family import Graphs, Limits
from trieton_builder.export.quiet import no_remarks

OPSET = 18
EXTERNAL_ABOVE = 1_900_000_000  # bytes of weights; a protobuf file ends at 2 GiB
SMALL_TENSOR = 64  # elements of a constant that is not worth narrowing

# Example sizes. None is 1: `torch.onnx.export` would take a 1 for a fixed size and declare wrong output shapes.
_BATCH, _BEAMS, _PARENTS, _LENGTH, _SUFFIX, _WIDTH = 2, 3, 4, 12, 2, 5


@dataclass(frozen=True)
class _Graph:
    """One module with example inputs, their dynamic dimensions and the names of inputs and outputs."""

    name: str
    module: nn.Module
    args: tuple
    dims: tuple
    inputs: list[str]
    outputs: list[str]


def export_onnx(
    graphs: Graphs, limits: Limits, out_dir: Path, *, dtype: torch.dtype, store_bfloat16: bool = False
) -> list[Path]:
    """Write `prefill.onnx` and `decode.onnx` into `out_dir`, with `*.onnx.data` beside them where weights are large.

    Args:
        dtype: of the modules' weights, keys and values: float32 or float16.
        store_bfloat16: keep float32 weights as bfloat16 in the file; the engine widens them when it loads.

    Returns:
        All files written.
    """
    files = []
    for graph in _both(graphs, limits, dtype):
        with torch.no_grad(), no_remarks():
            program = torch.onnx.export(
                graph.module.eval(),
                graph.args,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=graph.dims,
                input_names=graph.inputs,
                output_names=graph.outputs,
                verbose=False,
            )
        model = program.model
        _strip(model)
        if store_bfloat16:
            _narrow(model)
        path = out_dir / f"{graph.name}.onnx"
        files.append(path)
        if sum(value.const_value.nbytes for value in model.graph.initializers.values()) <= EXTERNAL_ABOVE:
            onnx_ir.save(model, path)
        else:
            files.append(path.with_name(path.name + ".data"))
            onnx_ir.save(model, path, external_data=files[-1].name)
    return files


def export_programs(graphs: Graphs, limits: Limits, out_dir: Path, *, dtype: torch.dtype) -> list[Path]:
    """Write `prefill.pt2` and `decode.pt2`, `torch.export` programs without anything pickled, into `out_dir`."""
    files = []
    for graph in _both(graphs, limits, dtype):
        with torch.no_grad(), no_remarks():
            program = torch.export.export(
                graph.module.eval(),
                graph.args,
                dynamic_shapes=graph.dims,
                # Its solver refuses bounds that it cannot prove, e.g. min(S, S * S) = S; run time sees numbers.
                prefer_deferred_runtime_asserts_over_guards=True,
            )
        program.example_inputs = None  # would be pickled
        files.append(out_dir / f"{graph.name}.pt2")
        _save_program(program, files[-1])
    return files


class _PatientFile(io.BufferedWriter):
    """A file that keeps the first error of a write, or Ctrl-C in one, for later.

    PyTorch's archive writer ends the whole process where a write fails before it is closed.
    """

    error: BaseException | None = None

    def write(self, data: Any, /) -> int:
        if self.error is None:
            try:
                super().write(data)
            except BaseException as error:
                self.error = error
        return len(data)


def _save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    with _PatientFile(io.FileIO(path, "w")) as file:
        torch.export.save(program, file)
        if file.error is not None:
            raise file.error


def _both(graphs: Graphs, limits: Limits, dtype: torch.dtype) -> tuple[_Graph, _Graph]:
    ids = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
    level_tokens = torch.arange(_WIDTH)
    length = torch.export.Dim("length", min=1, max=limits.table_length)
    batch, beams = torch.export.Dim("batch", min=1), torch.export.Dim("beams", min=1)
    parents, width = torch.export.Dim("past_beams", min=1), torch.export.Dim("width", min=1)
    suffix = torch.export.Dim("suffix", min=0, max=limits.table_levels - 1)
    prompt_dims, beam_dims = {0: batch, 1: length}, {0: batch, 1: beams}
    prefix_dims, past_dims = {0: batch, 2: length}, {0: batch, 1: parents, 3: suffix}
    layers = graphs.num_layers
    names = [f"{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    prefix, past, present = (
        [f"{group}.{name}" for name in names] for group in ("prefix", "past_key_values", "present")
    )

    def pairs(shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        return [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(layers)]

    prefill_args: tuple[Any, ...] = (ids, torch.ones_like(ids), level_tokens)
    decode_args: tuple[Any, ...] = (
        torch.ones(_BATCH, _BEAMS, dtype=torch.int64),
        torch.zeros(_BATCH, _BEAMS, dtype=torch.int64),
        torch.ones_like(ids),
        level_tokens,
        pairs((_BATCH, graphs.kv_heads, _LENGTH, graphs.head_dim)),
        pairs((_BATCH, _PARENTS, graphs.kv_heads, _SUFFIX, graphs.head_dim)),
    )
    pair_dims = [[(dims, dims)] * layers for dims in (prefix_dims, past_dims)]
    return (
        _Graph(
            "prefill",
            graphs.prefill,
            prefill_args,
            (prompt_dims, prompt_dims, {0: width}),
            ["input_ids", "attention_mask", "level_tokens"],
            ["logits", "log_z", *prefix, *(present if graphs.first_suffix else [])],
        ),
        _Graph(
            "decode",
            graphs.decode,
            decode_args,
            (beam_dims, beam_dims, prompt_dims, {0: width}, *pair_dims),
            ["input_ids", "parents", "attention_mask", "level_tokens", *prefix, *past],
            ["logits", "log_z", *present],
        ),
    )


def _narrow(model: onnx_ir.Model) -> None:
    """Store float32 weights that bfloat16 holds exactly as bfloat16, and cast them where they are used.

    ONNX Runtime has few bfloat16 kernels, so the graph itself stays float32; it folds the casts when it loads.
    """
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.dtype != onnx_ir.DataType.FLOAT or tensor.size < SMALL_TENSOR:
            continue
        wide = tensor.numpy()
        rounded = wide.astype(ml_dtypes.bfloat16)
        if not np.array_equal(rounded.astype(np.float32), wide):
            continue  # a table made at export, e.g. of rotary positions, keeps its precision
        narrow = onnx_ir.Tensor(rounded, name=f"{name}.bfloat16")
        stored = onnx_ir.Value(
            name=narrow.name,
            shape=value.shape,
            type=onnx_ir.TensorType(onnx_ir.DataType.BFLOAT16),
            const_value=narrow,
        )
        cast = onnx_ir.node("Cast", [stored], attributes={"to": onnx_ir.DataType.FLOAT}, num_outputs=1)
        cast.outputs[0].name, cast.outputs[0].shape, cast.outputs[0].type = f"{name}.wide", value.shape, value.type
        onnx_ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        graph.initializers.pop(name)
        graph.register_initializer(stored)
        graph.insert_before(graph[0], cast)


def _strip(model: onnx_ir.Model) -> None:
    """Drop what names the machine that exported (stack traces with paths), so that equal models give equal files."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.doc_string = model.doc_string = None
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
