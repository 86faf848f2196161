"""Every model family against its Hugging Face class, and what an export refuses."""

import itertools
import json
import os
import shutil
from pathlib import Path

import hugging_face
import numpy as np
import onnx
import optimum_layout
import pytest
import tiny_retriever
import torch
import transformers
from trieton.retriever.session import PromptTemplate, Retriever, RetrieverSpec, TokenMap
from trieton.retriever.torch_export import TorchEngine
from trieton.search.beam import beam_search
from trieton_builder.cli import app
from trieton_builder.export import FAMILIES, ExportError, export_retriever
from trieton_builder.export import exporter as exporter_module
from trieton_builder.export import graphs as graphs_module
from trieton_builder.export.checkpoint import load_checkpoint
from trieton_builder.export.family import Limits
from trieton_builder.export.llama import llama_graphs
from trieton_builder.export.optimum import adopt_optimum
from trieton_builder.export.parity import largest_difference
from trieton_builder.indexing.trie import build_index
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

VOCAB_SIZE = 71
SIZES = (5, 9, 7)
PROMPT = PromptTemplate(TokenMap((range(3, 8), tuple(range(60, 69)), range(20, 27))), max_items=6, suffix=(1,))

LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def build(name: str) -> torch.nn.Module:
    """A random tiny model, spread enough that its beams differ."""
    torch.manual_seed(0)
    kind, _, variant = name.partition(" ")
    layers = 1 if variant == "small" else 2
    if kind == "t5":
        gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if variant else {}
        config = transformers.T5Config(
            vocab_size=VOCAB_SIZE,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            num_decoder_layers=1,
            decoder_start_token_id=0,
            **gated,
        )
        model = transformers.T5ForConditionalGeneration(config)
        if variant:  # T5 1.1 checkpoints have a head of their own
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        return model.eval()
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB_SIZE, n_positions=40, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3
        )
        return transformers.GPT2LMHeadModel(config).eval()
    extra = {
        "llama": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        "mistral": {"head_dim": 16},
        "qwen2": {},
        "qwen3": {"head_dim": 16},
    }[kind]
    classes = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config = getattr(transformers, f"{classes[kind]}Config")(**{**LLAMA, **extra, "num_hidden_layers": layers})
    model = getattr(transformers, f"{classes[kind]}ForCausalLM")(config).eval()
    for (
        parameter_name,
        parameter,
    ) in model.named_parameters():  # biases and norms begin at 0 and 1 and would hide mistakes
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.2 * (1 if "bias" in parameter_name else 0.5)
    return model


def check_against_hugging_face(model: torch.nn.Module, retriever: Retriever) -> None:
    """Log-probabilities of every beam, and the lists of `generate` under the same catalogue."""
    assert largest_difference(model, retriever, seed=1) < 5e-5
    rng = np.random.default_rng(0)
    everything = np.array(list(itertools.product(*map(range, SIZES))))
    codes = everything[rng.choice(len(everything), 80, replace=False)]
    prompts = [rng.integers(0, VOCAB_SIZE, n) for n in (1, 11, 19)]
    index = build_index(codes, codebook_sizes=SIZES)
    found = beam_search(retriever.start(prompts), index, batch_size=3, beam_width=10)
    for b, prompt in enumerate(prompts):
        sequences, scores = hugging_face.beam_search(model, prompt, codes, PROMPT.token_map, 10)
        assert [tuple(row) for row in found.codes[b].tolist()] == sequences
        np.testing.assert_allclose(found.scores[b], scores, atol=1e-4)


@pytest.mark.case("B12")
@pytest.mark.parametrize("name", ["t5", "t5 gated", "gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_a_family_computes_what_its_hugging_face_class_computes(name):
    model = build(name)
    graphs = FAMILIES[model.config.model_type](model, Limits(PROMPT.longest, 3), "vocabulary")
    spec = RetrieverSpec(model.config.model_type, VOCAB_SIZE, PROMPT.longest, PROMPT, engine="torch")
    check_against_hugging_face(model, Retriever(spec, TorchEngine(graphs.prefill, graphs.decode)))


@pytest.mark.parametrize("name", ["t5", "gpt2", "qwen3"])
def test_programs_of_torch_export_compute_what_the_model_computes(name, tmp_path):
    model = build(name)
    export = export_retriever(model, tmp_path / "retriever", PROMPT, engine="torch")
    assert export.spec.engine == "torch"
    assert export.largest_difference is not None
    assert export.largest_difference < 5e-5
    check_against_hugging_face(model, Retriever.open(tmp_path / "retriever", device="cpu"))


def test_a_program_with_anything_pickled_is_refused(tmp_path):
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    program = torch.export.export(Twice(), (torch.zeros(2),))
    torch.export.save(program, tmp_path / "prefill.pt2")  # with its example inputs, which are pickled
    with pytest.raises(ValueError, match=r"prefill\.pt2: not a usable torch\.export program .*pickled example inputs"):
        TorchEngine.open(tmp_path, device="cpu")
    with pytest.raises(ValueError, match=r"prefill\.pt2: not a usable torch\.export program"):
        TorchEngine.open(tmp_path / "none", device="cpu")


def test_prompts_may_be_padded_on_either_side():
    limits = Limits(max_length=12, num_levels=3)
    for name, family in (("qwen3", llama_graphs), ("t5", exporter_module.t5_graphs)):
        prefill = family(build(name), limits, "vocabulary").prefill
        ids = torch.randint(3, VOCAB_SIZE, (1, 7))
        padding = torch.zeros(1, 5, dtype=torch.int64)
        with torch.no_grad():
            right, left = (
                prefill(torch.cat([row.clone() for row in rows], 1), torch.cat(mask, 1), torch.arange(VOCAB_SIZE))
                for rows, mask in (
                    ((ids, padding + 9), (torch.ones_like(ids), padding)),
                    ((padding + 9, ids), (padding, torch.ones_like(ids))),
                )
            )
        torch.testing.assert_close(left[0], right[0], atol=1e-5, rtol=0)


def test_graphs_declare_the_ecosystems_names_dynamic_shapes_and_a_fixed_opset(tiny_graphs):
    prefill, decode = onnx.load(tiny_graphs / "prefill.onnx"), onnx.load(tiny_graphs / "decode.onnx")

    def shapes(values) -> dict[str, list]:
        return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}

    assert {opset.version for opset in prefill.opset_import if not opset.domain} == {18}
    assert shapes(prefill.graph.output)["prefix.0.key"] == ["batch", 2, "length", 8]
    assert shapes(decode.graph.input) == {
        "input_ids": ["batch", "beams"],
        "parents": ["batch", "beams"],
        "attention_mask": ["batch", "length"],
        "level_tokens": ["width"],
        "prefix.0.key": ["batch", 2, "length", 8],
        "prefix.0.value": ["batch", 2, "length", 8],
        "past_key_values.0.key": ["batch", "past_beams", 2, "suffix", 8],
        "past_key_values.0.value": ["batch", "past_beams", 2, "suffix", 8],
    }
    assert shapes(decode.graph.output) == {
        "logits": ["batch", "beams", "width"],
        "log_z": ["batch", "beams"],
        "present.0.key": ["batch", "beams", 2, "suffix + 1", 8],
        "present.0.value": ["batch", "beams", 2, "suffix + 1", 8],
    }


def test_an_export_names_no_path_of_the_machine_that_made_it(tiny_graphs):
    for name in ("prefill.onnx", "decode.onnx"):
        content = (tiny_graphs / name).read_bytes()
        assert b"site-packages" not in content
        assert os.fsencode(os.getcwd()) not in content


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.05), ("bfloat16", 5e-5)])
def test_half_precision_halves_the_files_and_large_weights_lie_beside_the_graphs(
    dtype, tolerance, tmp_path, monkeypatch
):
    monkeypatch.setattr(graphs_module, "EXTERNAL_ABOVE", 1000 if dtype == "float16" else 10**9)
    model, folder = build("llama small"), tmp_path / "retriever"
    normalise = "vocabulary" if dtype == "float16" else "level"
    export = export_retriever(model, folder, PROMPT, dtype=dtype, normalise=normalise)
    assert (export.spec.dtype, export.spec.normalise) == (dtype, normalise)
    assert export.largest_difference is not None
    assert export.largest_difference < tolerance
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert ("decode.onnx.data" in sizes) == ("prefill.onnx.data" in sizes) == (dtype == "float16")
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert sizes["decode.onnx"] + sizes.get("decode.onnx.data", 0) < 0.5 * weights + 40_000
    logits, log_z = Retriever.open(folder).start([np.array([3, 4])])(0, None, None)
    assert logits.dtype == log_z.dtype == np.float32
    total = np.exp(logits - log_z[..., None]).sum(-1)
    np.testing.assert_array_equal(np.isclose(total, 1, atol=1e-5), normalise == "level")


def test_graphs_that_differ_from_the_model_are_refused_and_nothing_is_left(tiny_graphs, tmp_path, monkeypatch):
    def another_models(graphs, limits, out_dir, **options):
        return [Path(shutil.copy(tiny_graphs / f"{name}.onnx", out_dir)) for name in ("prefill", "decode")]

    monkeypatch.setattr(exporter_module, "export_onnx", another_models)
    with pytest.raises(ExportError, match="differ from the model's by up to"):
        export_retriever(tiny_retriever.tiny_t5(seed=1), tmp_path / "retriever", PROMPT)
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(ExportError, match=r"0\.0 GB free, the export needs up to 0\.1 GB"):
        export_retriever(build("t5"), tmp_path / "retriever", PROMPT)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_take_the_prompts_is_refused(tmp_path):
    with pytest.raises(ExportError, match="need 41 positions, the model has 40"):
        export_retriever(build("gpt2"), tmp_path / "retriever", PROMPT, max_length=39)
    window = transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, sliding_window=16))
    with pytest.raises(ExportError, match="outgrow the sliding window of 16"):
        export_retriever(window, tmp_path / "retriever", PROMPT)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    changing = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, rope_parameters=rope))
    with pytest.raises(ExportError, match="'dynamic' change with the length"):
        export_retriever(changing, tmp_path / "retriever", PROMPT)
    with pytest.raises(ValueError, match="token 68 lies outside the model's vocabulary of 68"):
        export_retriever(
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "vocab_size": 68})),
            tmp_path / "retriever",
            PROMPT,
        )
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    config = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(ExportError, match="model type 'bert': not supported; expected one of t5, gpt2, llama"):
        export_retriever(transformers.BertModel(config), tmp_path / "retriever", PROMPT)


def test_an_existing_directory_is_kept_unless_asked_to_overwrite(tmp_path):
    (tmp_path / "retriever").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        export_retriever(build("t5"), tmp_path / "retriever", PROMPT)
    (tmp_path / "retriever" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"holds no retriever\.json"):
        export_retriever(build("t5"), tmp_path / "retriever", PROMPT, check=False, overwrite=True)
    assert (tmp_path / "retriever" / "thesis.txt").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    build("qwen3").save_pretrained(folder)
    return folder


def run(*arguments: object):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_the_command_exports_a_checkpoint_and_says_the_largest_difference(checkpoint, tmp_path):
    declaration = tmp_path / "tokens.json"
    declaration.write_text(json.dumps({"token_map": PROMPT.token_map.to_json(), "prompt": PROMPT.to_json()}))
    result = run(checkpoint, "--token-map", declaration, "--out", tmp_path / "retriever", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["largest_difference"] < 5e-5
    retriever = Retriever.open(tmp_path / "retriever")
    assert retriever.spec.to_json() == printed["retriever"]
    assert retriever.spec.prompt == PROMPT
    check_against_hugging_face(build("qwen3"), retriever)
    again = run(checkpoint, "--token-map", tmp_path / "retriever" / "retriever.json", "--out", tmp_path / "retriever")
    assert again.exit_code == 1
    assert "exists already" in again.output


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: missing"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "pickled weights can run code and are refused",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" * 40), "not loadable"),
        (
            lambda folder: (
                (folder / "model.safetensors").unlink(),
                (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}'),
            ),
            "part-1.safetensors: missing",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'),
            "model type 'bert' is not supported",
        ),
        (
            lambda folder: (folder / "config.json").write_text(
                (folder / "config.json").read_text().replace('"intermediate_size": 40', '"intermediate_size": 48')
            ),
            "weights are missing or have another shape",
        ),
    ],
)
def test_a_bad_checkpoint_is_refused_in_one_line(checkpoint, tmp_path, damage, text):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    damage(folder)
    declaration = tmp_path / "tokens.json"
    declaration.write_text(json.dumps(PROMPT.token_map.to_json()))
    result = run(folder, "--token-map", declaration, "--out", tmp_path / "retriever", "--max-items", 4)
    assert result.exit_code == 1
    assert text in result.output
    assert not (tmp_path / "retriever").exists()


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ("{", "tokens.json: "),
        ("{}", "expected a list with one object per level"),
        ('[{"start": 3}]', "level 0: expected"),
        ('{"token_map": [{"start": 3, "size": 2}], "prompt": {"items": 3}}', "prompt template: expected max_items"),
    ],
)
def test_a_bad_declaration_is_refused_before_the_checkpoint_is_read(tmp_path, declared, text):
    (tmp_path / "tokens.json").write_text(declared)
    result = run(tmp_path / "none", "--token-map", tmp_path / "tokens.json", "--out", tmp_path / "retriever")
    assert result.exit_code == 1
    assert text in result.output


def test_load_checkpoint_gives_the_saved_weights(checkpoint):
    loaded = load_checkpoint(checkpoint, FAMILIES)
    wanted = build("qwen3").state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("name", ["qwen3", "t5", "t5 merged"])
def test_graphs_in_optimums_layout_run_too_and_say_what_they_cost(name, tmp_path, caplog):
    kind, _, merged = name.partition(" ")
    model = build(kind)
    write = optimum_layout.write_encoder_decoder if kind == "t5" else optimum_layout.write_decoder_only
    folder = write(model, tmp_path / "graphs", PROMPT.longest + 3)
    if merged:
        optimum_layout.merge_decoders(folder)
    (tmp_path / "tokens.json").write_text(
        json.dumps({"token_map": PROMPT.token_map.to_json(), "prompt": PROMPT.to_json()})
    )
    result = run(
        folder, "--token-map", tmp_path / "tokens.json", "--out", tmp_path / "retriever", "--engine", "optimum"
    )
    assert result.exit_code == 0, result.output
    with caplog.at_level("WARNING", logger="trieton"):
        retriever = Retriever.open(tmp_path / "retriever")
    assert "every beam holds the prompt's keys and values of its own" in caplog.text
    check_against_hugging_face(model, retriever)


def test_adopted_graphs_are_compared_with_the_checkpoint_they_were_made_from(tmp_path):
    model, other = build("qwen3"), build("qwen3")
    other.lm_head.weight.data *= 2
    folder = optimum_layout.write_decoder_only(model, tmp_path / "graphs", PROMPT.longest + 3)
    export = adopt_optimum(folder, tmp_path / "retriever", PROMPT, model=model)
    assert export.largest_difference is not None
    assert export.largest_difference < 5e-5
    with pytest.raises(ExportError, match=r"differ from the checkpoint's by up to .* were they made from it"):
        adopt_optimum(folder, tmp_path / "another", PROMPT, model=other)
    assert not (tmp_path / "another").exists()


@pytest.mark.parametrize(
    "options",
    [["--engine", "optimum", "--dtype", "float16"], ["--engine", "optimum", "--no-check"], ["--compare-with", "x"]],
)
def test_options_of_another_engine_are_refused_not_ignored(options, tmp_path):
    (tmp_path / "tokens.json").write_text(json.dumps(PROMPT.token_map.to_json()))
    result = run(tmp_path, "--token-map", tmp_path / "tokens.json", "--out", tmp_path / "retriever", *options)
    assert result.exit_code == 1
    assert options[-2 if options[-1] in ("float16", "x") else -1] in result.output
    assert not (tmp_path / "retriever").exists()


def test_a_folder_without_a_known_layout_is_refused(tmp_path):
    with pytest.raises(ExportError, match="no graphs in Optimum's layout"):
        adopt_optimum(tmp_path, tmp_path / "retriever", PROMPT)
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ExportError, match=r"config\.json: expected vocab_size"):
        adopt_optimum(tmp_path, tmp_path / "retriever", PROMPT)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "model_type": "llama"}))
    with pytest.raises(ExportError, match="the graphs do not run"):
        adopt_optimum(tmp_path, tmp_path / "retriever", PROMPT)
    assert not (tmp_path / "retriever").exists()
