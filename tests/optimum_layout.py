"""Graphs in the layout that Optimum writes, made from our own modules: a beam is a row of the batch, nothing is shared.

Used by the tests of that engine and as the benchmark's other side: the same model with the prompt's keys and values
repeated for every beam.
"""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.compose
import torch
from torch import Tensor, nn
from trieton_builder.export.attention import KeyValue, mask_bias, softmax
from trieton_builder.export.family import Limits
from trieton_builder.export.llama import llama_graphs
from trieton_builder.export.quiet import no_remarks
from trieton_builder.export.t5 import t5_graphs

ROWS, NEW, PAST, LENGTH = 2, 3, 4, 5  # example sizes


class DecoderOnly(nn.Module):
    """Tokens [N, s], mask [N, P + s], positions [N, s] and past [N, G, P, D] -> logits [N, s, V] and present.

    With `by_lengths`, attention takes the mask for a number of places, as some fused kernels do.
    """

    def __init__(self, decoder: nn.Module, *, by_lengths: bool = False):
        super().__init__()
        self.decoder, self.by_lengths = decoder, by_lengths

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[KeyValue]
    ) -> tuple[Tensor, list[KeyValue]]:
        hidden = self.decoder.embed(input_ids, position_ids)
        place = torch.arange(attention_mask.shape[1])
        own = torch.arange(input_ids.shape[1]) + past[0][0].shape[2]
        if self.by_lengths:
            attention_mask = (place < attention_mask.sum(1, keepdim=True)).to(torch.int64)
        visible = attention_mask[:, None, :] * (own[:, None] >= place[None, :]).to(torch.int64)  # [N, s, P + s]
        present = []
        for layer, (past_key, past_value) in zip(self.decoder.layers, past, strict=True):
            q, k, v = layer.project(hidden, position_ids)
            k, v = torch.cat([past_key, k.transpose(1, 2)], 2), torch.cat([past_value, v.transpose(1, 2)], 2)
            present.append((k, v))
            groups, dim = k.shape[1], k.shape[3]
            rows = q.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)  # [N, G, H / G, s, D]
            scores = rows @ k.unsqueeze(2).transpose(-1, -2) * layer.scale
            weights = softmax(scores + mask_bias(visible, scores.dtype)[:, None, None])
            mixed = (weights @ v.unsqueeze(2)).permute(0, 3, 1, 2, 4).reshape(*hidden.shape[:2], -1, dim)
            hidden = layer.finish(hidden, mixed.flatten(2))
        head = self.decoder.head
        return nn.functional.linear(self.decoder.norm(hidden) * head.scale, head.weight, head.bias), present


class T5Encoder(nn.Module):
    """Tokens and mask [N, S] -> hidden states [N, S, d]."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.encoder = model.encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class T5Decoder(nn.Module):
    """One token per row; with `cached`, from past keys and values, else from the encoder's hidden states."""

    def __init__(self, step: nn.Module, *, cached: bool):
        super().__init__()
        self.step, self.cached = step, cached

    def forward(self, encoder_attention_mask: Tensor, input_ids: Tensor, rest: Tensor | list) -> tuple[Tensor, list]:
        blocks = self.step.decoder.block
        if self.cached:
            own = [(k.unsqueeze(1), v.unsqueeze(1)) for k, v, _, _ in rest]
            crossed = [(k, v) for _, _, k, v in rest]
        else:
            own = [None] * len(blocks)
            attentions = [block.layer[1].EncDecAttention for block in blocks]
            crossed = [
                tuple(
                    getattr(attention, name)(rest).unflatten(-1, (-1, attention.key_value_proj_dim)).transpose(1, 2)
                    for name in "kv"
                )
                for attention in attentions
            ]
        mask = mask_bias(encoder_attention_mask[:, None, None, :], crossed[0][0].dtype)
        vocabulary = torch.arange(self.step.head.weight.shape[0])
        logits, _, grown = self.step(input_ids, mask, vocabulary, crossed, own)
        present = [(k.squeeze(1), v.squeeze(1)) for k, v in grown]
        if self.cached:
            return logits, present
        return logits, [(*own_pair, *pair) for own_pair, pair in zip(present, crossed, strict=True)]


def write_decoder_only(model: nn.Module, folder: Path, max_length: int, *, by_lengths: bool = False) -> Path:
    """`model.onnx` of a Llama-shaped model."""
    graphs = llama_graphs(model, Limits(max_length, 32), "vocabulary")
    layers, shape = graphs.num_layers, (ROWS, graphs.kv_heads, PAST, graphs.head_dim)
    names = [f"{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    past, present = ([f"{group}.{name}" for name in names] for group in ("past_key_values", "present"))
    _write(
        folder / "model.onnx",
        DecoderOnly(graphs.decode.decoder, by_lengths=by_lengths),
        (
            torch.ones(ROWS, NEW, dtype=torch.int64),
            torch.ones(ROWS, PAST + NEW, dtype=torch.int64),
            torch.ones(ROWS, NEW, dtype=torch.int64),
            [(torch.zeros(shape), torch.zeros(shape)) for _ in range(layers)],
        ),
        {
            "input_ids": {0: "batch", 1: "new"},
            "attention_mask": {0: "batch", 1: "total"},
            "position_ids": {0: "batch", 1: "new"},
            **{name: {0: "batch", 2: "past"} for name in past},
        },
        {"logits": {0: "batch", 1: "new"}, **{name: {0: "batch", 2: "total"} for name in present}},
    )
    return _config(model, folder)


def write_encoder_decoder(model: nn.Module, folder: Path, max_length: int) -> Path:
    """`encoder_model.onnx`, `decoder_model.onnx` and `decoder_with_past_model.onnx` of a T5."""
    graphs = t5_graphs(model, Limits(max_length, 32), "vocabulary")
    step, layers = graphs.decode.step, graphs.num_layers
    ids, token = torch.ones(ROWS, LENGTH, dtype=torch.int64), torch.ones(ROWS, 1, dtype=torch.int64)
    prompt, row = {0: "batch", 1: "length"}, {0: "batch"}
    _write(
        folder / "encoder_model.onnx",
        T5Encoder(model),
        (ids, torch.ones_like(ids)),
        {"input_ids": prompt, "attention_mask": prompt},
        {"last_hidden_state": prompt},
    )
    sides = {"decoder.key": "past", "decoder.value": "past", "encoder.key": "length", "encoder.value": "length"}
    cache = {f"{i}.{side}": {0: "batch", 2: name} for i in range(layers) for side, name in sides.items()}
    present = {f"present.{name}": dims for name, dims in cache.items()}
    _write(
        folder / "decoder_model.onnx",
        T5Decoder(step, cached=False),
        (torch.ones_like(ids), token, torch.zeros(ROWS, LENGTH, model.config.d_model)),
        {"encoder_attention_mask": prompt, "input_ids": row, "encoder_hidden_states": prompt},
        {"logits": row, **present},
    )
    sizes = (PAST, PAST, LENGTH, LENGTH)
    values = [tuple(torch.zeros(ROWS, graphs.kv_heads, size, graphs.head_dim) for size in sizes) for _ in range(layers)]
    _write(
        folder / "decoder_with_past_model.onnx",
        T5Decoder(step, cached=True),
        (torch.ones_like(ids), token, values),
        {
            "encoder_attention_mask": prompt,
            "input_ids": row,
            **{f"past_key_values.{name}": dims for name, dims in cache.items()},
        },
        {"logits": row, **{name: dims for name, dims in present.items() if "decoder." in name}},
    )
    return _config(model, folder)


def merge_decoders(folder: Path) -> None:
    """Replace both decoders of a T5 by `decoder_model_merged.onnx`: two branches of one graph, as Optimum merges them.

    Its branch with a cache has nothing new of the encoder to hand out, so tensors of no rows take that place.
    """
    names = ("decoder_with_past_model.onnx", "decoder_model.onnx")
    cached, first = (
        onnx.compose.add_prefix_graph(onnx.load(str(folder / n)).graph, n[8:12], rename_inputs=False) for n in names
    )
    outputs = [output.name.removeprefix("mode") for output in first.output]
    made = {output.name.removeprefix("with") for output in cached.output}
    shapes = {value.name: value for value in cached.input}
    for name in outputs:
        if name not in made:
            past = shapes[name.replace("present", "past_key_values")].type.tensor_type.shape.dim
            empty = np.zeros((0, past[1].dim_value, 1, past[3].dim_value), np.float32)
            node = onnx.helper.make_node("Constant", [], [f"with{name}"], value=onnx.numpy_helper.from_array(empty))
            cached.node.append(node)
    branches = {}
    for key, graph, prefix in (("then_branch", cached, "with"), ("else_branch", first, "mode")):
        values = [onnx.helper.make_tensor_value_info(prefix + name, onnx.TensorProto.FLOAT, None) for name in outputs]
        branches[key] = onnx.helper.make_graph(graph.node, key, [], values, graph.initializer)
    inputs = {value.name: value for value in [*first.input, *cached.input]}
    flag = onnx.helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])
    merged = onnx.helper.make_graph(
        [onnx.helper.make_node("If", ["use_cache_branch"], outputs, **branches)],
        "merged",
        [*inputs.values(), flag],
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(merged, opset_imports=opset), str(folder / "decoder_model_merged.onnx"))
    for name in names:
        (folder / name).unlink()


def _write(path: Path, module: nn.Module, args: tuple, inputs: dict, outputs: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad(), no_remarks():
        # The older exporter: several times faster, and what most graphs in this layout were made with.
        torch.onnx.export(
            module.eval(),
            args,
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes={**inputs, **outputs},
        )


def _config(model: nn.Module, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    return folder
