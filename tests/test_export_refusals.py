"""Checkpoints, declarations and dtypes that would give wrong scores in silence, and what an export says to them."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from trieton.retriever.session import PromptTemplate, Retriever, RetrieverSpec, TokenMap
from trieton.retriever.torch_export import TorchEngine
from trieton_builder.export import FAMILIES, ExportError, export_retriever
from trieton_builder.export import exporter as exporter_module
from trieton_builder.export.checkpoint import load_checkpoint
from trieton_builder.export.declaration import read_declaration
from trieton_builder.export.exporter import _rounded
from trieton_builder.export.family import Limits
from trieton_builder.export.graphs import _save_program
from trieton_builder.export.optimum import adopt_optimum
from trieton_builder.export.parity import largest_difference

pytestmark = pytest.mark.usefixtures("one_torch_thread")

VOCAB_SIZE = 40
PROMPT = PromptTemplate(TokenMap((range(3, 8), range(20, 27))), max_items=3)
LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
T5 = {"vocab_size": VOCAB_SIZE, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}


def llama(**changes) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **changes})).eval()


def t5(**changes) -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = transformers.T5Config(**{**T5, "decoder_start_token_id": 0, **changes})
    return transformers.T5ForConditionalGeneration(config).eval()


def retriever_of(model: torch.nn.Module) -> Retriever:
    graphs = FAMILIES[model.config.model_type](model, Limits(PROMPT.longest, 2), "vocabulary")
    spec = RetrieverSpec(model.config.model_type, VOCAB_SIZE, PROMPT.longest, PROMPT, engine="torch")
    return Retriever(spec, TorchEngine(graphs.prefill, graphs.decode))


def test_the_comparison_fails_for_one_weight_that_is_wrong_or_no_number():
    assert largest_difference(llama(), retriever_of(llama())) < 1e-4
    wrong, broken = llama(), llama()
    wrong.model.layers[0].input_layernorm.weight.data[0] += 0.5
    assert largest_difference(llama(), retriever_of(wrong)) > 1e-2
    broken.lm_head.weight.data[3] = torch.nan
    assert np.isnan(largest_difference(llama(), retriever_of(broken)))
    assert np.isnan(largest_difference(broken, retriever_of(llama())))


def test_activations_that_outgrow_float16_are_refused(tmp_path, monkeypatch):
    model = t5(feed_forward_proj="relu")
    with torch.no_grad():
        model.encoder.block[0].layer[-1].DenseReluDense.wi.weight.mul_(100)
        model.encoder.block[0].layer[-1].DenseReluDense.wo.weight.mul_(1e4)
    kept = []
    # Without writing the programs, which takes seconds: the modules themselves are compared.
    monkeypatch.setattr(exporter_module, "export_programs", lambda graphs, *_, **__: kept.append(graphs) or [])

    def opened(folder: Path) -> Retriever:
        return Retriever(RetrieverSpec.load(folder), TorchEngine(kept[0].prefill, kept[0].decode))

    monkeypatch.setattr(Retriever, "open", opened)
    with pytest.raises(ExportError, match="log-probabilities are not numbers in float16"):
        export_retriever(model, tmp_path / "retriever", PROMPT, dtype="float16", engine="torch")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_the_weights_leaves_the_rotary_frequencies_alone(dtype):
    model = llama()
    rounded = _rounded(model, dtype)
    assert torch.equal(rounded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    kind = getattr(torch, dtype)
    assert torch.equal(rounded.lm_head.weight, model.lm_head.weight.to(kind).float())
    assert not torch.equal(rounded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("model", "dtype", "text"),
    [
        (llama(num_hidden_layers=0), "float32", "config: num_hidden_layers: expected at least one layer, got none"),
        (t5(num_decoder_layers=0), "float32", "config: num_decoder_layers: expected at least one layer"),
        (
            t5(decoder_start_token_id=None),
            "float32",
            "decoder_start_token_id: expected a token 0 <= token < 40, got None",
        ),
        (t5(decoder_start_token_id=40), "float32", "decoder_start_token_id: expected a token 0 <= token < 40, got 40"),
        (
            llama(
                rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
            ),
            "float32",
            "the model itself does not run: RuntimeError",
        ),
    ],
)
def test_a_model_that_cannot_run_is_refused_in_one_line(model, dtype, text, tmp_path):
    with pytest.raises(ExportError, match=text):
        export_retriever(model, tmp_path / "retriever", PROMPT, dtype=dtype)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), "float32"), (1e6, "float16")])
def test_weights_that_are_no_numbers_in_the_dtype_are_refused(value, dtype, tmp_path):
    model = llama()
    model.model.embed_tokens.weight.data[7, 3] = value
    with pytest.raises(ExportError, match=rf"embed_tokens\.weight: weights that are not finite numbers in {dtype}"):
        export_retriever(model, tmp_path / "nowhere" / "retriever", PROMPT, dtype=dtype)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    llama().save_pretrained(folder)
    return folder


def config(**changes):
    def change(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, **changes}))

    return change


def weight(name: str, tensor: torch.Tensor):
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, name: tensor}, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def index(text: str):
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(text)

    return change


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            config(num_hidden_layers=1),
            "9 weights have no place in the llama model of config.json, the first is model.l",
        ),
        (weight(f"{Q}.bias", torch.ones(32)), rf"1 weights have no place .* the first is {Q}\.bias"),
        (weight(f"{Q}.weight", torch.ones(32, 32, dtype=torch.int8)), "q_proj.weight: expected weights of .* got I8"),
        (config(vocab_size=30), r"lm_head\.weight \(\[40, 32\] in the file, \[30, 32\] by config\.json\)"),
        (config(hidden_size="x"), "not loadable .* 'hidden_size' expected int, got str"),
        (config(model_type=["llama"]), r"model type \['llama'\] is not supported"),
        (index('{"weight_map": {"a": 5}}'), r"index\.json: not readable .* expected names of files, got \{5\}"),
        (index('{"weight_map": {}}'), r"index\.json: not readable .* expected names of files"),
        (index("[" * 100_000), r"index\.json: not readable"),
    ],
)
def test_a_checkpoint_that_transformers_would_take_in_part_is_refused(checkpoint, change, text, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(ExportError, match=text) as caught:
        load_checkpoint(tmp_path / "model", FAMILIES)
    assert "\n" not in str(caught.value)


def test_constants_that_older_releases_saved_beside_the_weights_are_no_weights(tmp_path):
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_positions=20, n_embd=8, n_layer=1, n_head=2)
    )
    gpt2.save_pretrained(tmp_path)
    weight("transformer.h.0.attn.bias", torch.ones(1, 1, 20, 20, dtype=torch.uint8))(tmp_path)
    weight("transformer.h.0.attn.masked_bias", torch.tensor(-1e4))(tmp_path)
    loaded = load_checkpoint(tmp_path, FAMILIES)
    assert torch.equal(loaded.transformer.wpe.weight, gpt2.transformer.wpe.weight)


LEVELS = '[{"start": 3, "size": 5}, {"tokens": [20, 21]}]'


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ('[{"start": true, "size": 3}]', "level 0: expected"),
        (
            f'[{{"start": {10**30}, "size": 3}}]',
            "level 0: expected at least one token, none negative or above 2147483647",
        ),
        ('[{"start": 3, "size": 1000000000000000}]', "level 0: expected at least one token, none negative or above"),
        (f'[{{"tokens": [{10**30}]}}]', "level 0: expected at least one token"),
        (f'{{"token_map": {LEVELS}, "end_token": "x"}}', "expected an end token of 0 or more, got 'x'"),
        (f'{{"token_map": {LEVELS}, "end_token": true}}', "expected an end token of 0 or more, got True"),
        (f'{{"token_map": {LEVELS}, "end_token": 1.5}}', "expected an end token of 0 or more, got 1.5"),
        (f'{{"token_map": {LEVELS}, "prompt": []}}', r"prompt template: expected .* got \[\]"),
        (f'{{"token_map": {LEVELS}, "prompt": 0}}', "prompt template: expected .* got 0"),
        (f'{{"token_map": {LEVELS}, "prompt": {{"prefix": 5}}}}', r"prompt template: expected .* \(lists\)"),
        (f'{{"token_map": {LEVELS}, "prompt": {{"prefix": null}}}}', r"prompt template: expected .* \(lists\)"),
        (f'{{"token_map": {LEVELS}, "promt": {{}}}}', "expected token_map, .*prompt, got the field 'promt'"),
        (f'{{"token_map": {LEVELS}, "token_map": {LEVELS}}}', "the field 'token_map' stands in it twice"),
        ("[" * 100_000, "recursion"),
        ('"\udcff"', "decode byte"),
    ],
)
def test_a_declaration_of_another_shape_is_refused_with_the_files_name(declared, text, tmp_path):
    (tmp_path / "tokens.json").write_bytes(declared.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"tokens\.json: .*{text}"):
        read_declaration(tmp_path / "tokens.json")


def test_items_of_a_prompt_come_from_the_option_then_the_file_then_twenty(tmp_path):
    path = tmp_path / "tokens.json"

    def items(prompt: str, **options) -> tuple[int, tuple[int, ...]]:
        path.write_text(f'{{"token_map": {LEVELS}, "prompt": {prompt}}}')
        template = read_declaration(path, **options).prompt
        return template.max_items, template.suffix

    assert items('{"max_items": 7, "suffix": [1]}') == (7, (1,))
    assert items('{"max_items": 7, "suffix": [1]}', max_items=4) == (4, (1,))
    assert items('{"suffix": [1]}', max_items=4) == (4, (1,))
    assert items('{"suffix": [1]}') == (20, (1,))
    assert items("null") == (20, ())


def test_a_disk_that_fills_under_a_program_is_named_and_ends_nothing_else():
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(2),))
    program.example_inputs = None
    with pytest.raises(OSError, match="No space left on device"):
        _save_program(program, Path("/dev/full"))


def write_graph(folder: Path, rows: int) -> None:
    """A decoder-only graph in Optimum's layout in which every token is followed by any: logits are 0."""
    names = ["input_ids", "position_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value"]
    kinds = [onnx.TensorProto.INT64] * 3 + [onnx.TensorProto.FLOAT] * 2
    shapes = [["batch", "length"]] * 2 + [["batch", "all"]] + [["batch", 1, "past", 2]] * 2
    inputs = [onnx.helper.make_tensor_value_info(*value) for value in zip(names, kinds, shapes, strict=True)]
    outputs = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("logits", ["batch", "length", rows]), ("present.0.key", None), ("present.0.value", None))
    ]
    nodes = [onnx.helper.make_node("Gather", ["table", "input_ids"], ["logits"])]
    nodes += [
        onnx.helper.make_node("Identity", [f"past_key_values.0.{kind}"], [f"present.0.{kind}"])
        for kind in ("key", "value")
    ]
    table = onnx.numpy_helper.from_array(np.zeros((rows, rows), np.float32), "table")
    graph = onnx.helper.make_graph(nodes, "decoder", inputs, outputs, [table])
    opset = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), folder / "model.onnx")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"vocab_size": VOCAB_SIZE}, ""),
        ({"vocab_size": VOCAB_SIZE + 1}, "the graphs do not run"),
        ({"vocab_size": "40"}, "config.json: expected vocab_size and model_type .*got '40' and 'llama'"),
        ({"vocab_size": 40.0}, "config.json: expected vocab_size and model_type .*got 40.0 and 'llama'"),
        ({"vocab_size": VOCAB_SIZE, "model_type": [1]}, "config.json: expected vocab_size and model_type"),
    ],
)
def test_adopted_graphs_must_have_the_vocabulary_that_their_config_names(fields, text, tmp_path):
    write_graph(tmp_path, VOCAB_SIZE)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    if not text:
        assert adopt_optimum(tmp_path, tmp_path / "retriever", PROMPT).spec.vocab_size == VOCAB_SIZE
        return
    with pytest.raises(ExportError, match=text):
        adopt_optimum(tmp_path, tmp_path / "retriever", PROMPT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.onnx"]


def test_a_graph_that_was_cut_off_is_refused(tmp_path):
    write_graph(tmp_path, VOCAB_SIZE)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB_SIZE}))
    (tmp_path / "model.onnx").write_bytes((tmp_path / "model.onnx").read_bytes()[:-40])
    with pytest.raises(ExportError, match=r"model\.onnx: not an ONNX graph, or not the whole of one"):
        adopt_optimum(tmp_path, tmp_path / "retriever", PROMPT)


def test_a_level_of_a_mistyped_size_is_refused_by_the_vocabulary_without_writing_its_tokens_out():
    template = PromptTemplate(TokenMap((range(3, 2_000_000_000),)), max_items=1)
    with pytest.raises(ValueError, match="token 1999999999 lies outside the model's vocabulary of 40"):
        RetrieverSpec("llama", VOCAB_SIZE, 8, template)


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_size", "9"), ("max_length", None), ("max_length", 1 << 21), ("dtype", "int4"), ("vocab_size", True)],
)
def test_a_spec_with_a_field_of_another_type_is_refused(field, value):
    fields = RetrieverSpec("llama", VOCAB_SIZE, 8, PROMPT).to_json()
    with pytest.raises(ValueError, match=rf"{field}: expected .*, got {value!r}"):
        RetrieverSpec.from_json({**fields, field: value})
