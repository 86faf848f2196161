"""Modules -> ONNX graphs with dynamic batch, prompt length, beams and suffix, under the names of the ecosystem."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx_ir
import torch
from torch import Tensor, nn

from trieton_builder.export.family import Graphs, Limits

OPSET = 18
EXTERNAL_ABOVE = 1_900_000_000  # bytes of weights; a protobuf file ends at 2 GiB

# Example sizes. None is 1: `torch.onnx.export` would take a 1 for a fixed size and declare wrong output shapes.
_BATCH, _BEAMS, _PARENTS, _LENGTH, _SUFFIX, _WIDTH = 2, 3, 4, 12, 2, 5


def export_graphs(graphs: Graphs, limits: Limits, out_dir: Path, dtype: torch.dtype) -> list[Path]:
    """Write `prefill.onnx` and `decode.onnx` into `out_dir`, with `*.onnx.data` beside them where weights are large.

    Args:
        dtype: of the modules' keys and values.

    Returns:
        All files written.
    """
    num_layers = graphs.num_layers
    ids = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
    level_tokens = torch.arange(_WIDTH)
    length = torch.export.Dim("length", min=1, max=limits.table_length)
    batch, beams = torch.export.Dim("batch", min=1), torch.export.Dim("beams", min=1)
    parents, suffix = (
        torch.export.Dim("past_beams", min=1),
        torch.export.Dim("suffix", min=0, max=limits.table_levels - 1),
    )
    width = torch.export.Dim("width", min=1)
    prompt_dims = {0: batch, 1: length}
    names = [f"{i}.{kind}" for i in range(num_layers) for kind in ("key", "value")]
    present = _named("present", names)

    files = _export(
        graphs.prefill,
        out_dir / "prefill.onnx",
        args=(ids, torch.ones_like(ids), level_tokens),
        dims=(prompt_dims, prompt_dims, {0: width}),
        inputs=["input_ids", "attention_mask", "level_tokens"],
        outputs=[
            "logits",
            "log_z",
            *_named("prefix", names),
            *(_named("present", names) if graphs.first_suffix else []),
        ],
    )

    def pairs(shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        return [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(num_layers)]

    prefix_dims, past_dims = {0: batch, 2: length}, {0: batch, 1: parents, 3: suffix}
    beam_dims = {0: batch, 1: beams}
    files += _export(
        graphs.decode,
        out_dir / "decode.onnx",
        args=(
            torch.ones(_BATCH, _BEAMS, dtype=torch.int64),
            torch.zeros(_BATCH, _BEAMS, dtype=torch.int64),
            torch.ones_like(ids),
            level_tokens,
            pairs((_BATCH, graphs.kv_heads, _LENGTH, graphs.head_dim)),
            pairs((_BATCH, _PARENTS, graphs.kv_heads, _SUFFIX, graphs.head_dim)),
        ),
        dims=(
            beam_dims,
            beam_dims,
            prompt_dims,
            {0: width},
            [(prefix_dims, prefix_dims)] * num_layers,
            [(past_dims, past_dims)] * num_layers,
        ),
        inputs=[
            *("input_ids", "parents", "attention_mask", "level_tokens"),
            *_named("prefix", names),
            *_named("past_key_values", names),
        ],
        outputs=["logits", "log_z", *present],
    )
    return files


def _named(kind: str, names: list[str]) -> list[str]:
    return [f"{kind}.{name}" for name in names]


def _export(
    module: nn.Module, path: Path, *, args: tuple, dims: tuple, inputs: list[str], outputs: list[str]
) -> list[Path]:
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            module.eval(),
            args,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=dims,
            input_names=inputs,
            output_names=outputs,
            verbose=False,
        )
    model = program.model
    _strip(model)
    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    if weights <= EXTERNAL_ABOVE:
        onnx_ir.save(model, path)
        return [path]
    data = path.with_name(path.name + ".data")
    onnx_ir.save(model, path, external_data=data.name)
    return [path, data]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's remarks about its own names and about packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


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
