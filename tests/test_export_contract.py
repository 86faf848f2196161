"""The model is the one that was meant: prompts as the checkpoint says, weights whole, scores the same in any batch."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import optimum_layout
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, processors
from trieton.bundle import Bundle, BundleError, compute_bundle_id, describe_file
from trieton.retriever.session import PromptTemplate, Retriever, RetrieverSpec, TokenMap
from trieton.retriever.spec import Framing
from trieton.retriever.torch_export import TorchEngine
from trieton_builder.cli import app
from trieton_builder.export import FAMILIES, ExportError
from trieton_builder.export.checkpoint import load_checkpoint
from trieton_builder.export.declaration import Declaration, complete
from trieton_builder.export.family import Limits
from trieton_builder.export.optimum import adopt_optimum
from trieton_builder.export.parity import largest_difference
from trieton_builder.export.said import read_said
from trieton_builder.export.samples import compare, read_samples
from trieton_builder.export.weights import left_unread, weight_files
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

ROOT = Path(__file__).parents[1]
VOCAB_SIZE = 40
PROMPT = PromptTemplate(TokenMap((range(3, 8), range(20, 27))), max_items=3)
GPT2 = {"model_type": "gpt2", "vocab_size": VOCAB_SIZE}
T5 = {"model_type": "t5", "vocab_size": VOCAB_SIZE, "is_encoder_decoder": True, "decoder_start_token_id": 0}


def gpt2(**changes) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    fields = {"vocab_size": VOCAB_SIZE, "n_positions": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**fields, eos_token_id=2, **changes)).eval()


def tokenizer_that_adds(path: Path, template: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 5}, unk_token="a"))
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 9), ("</s>", 10)])
    tokenizer.save(str(path))


def contract(folder: Path, config: dict, files: dict | None = None, declared: dict | None = None, **options):
    for name, fields in {"config.json": config, **(files or {})}.items():
        if name == "tokenizer.json":
            tokenizer_that_adds(folder / name, fields)
        else:
            (folder / name).write_text(json.dumps(fields))
    return complete(Declaration(PROMPT, {"max_items": "the default", **(declared or {})}), read_said(folder), **options)


@pytest.mark.case("W17")
@pytest.mark.parametrize(
    ("config", "files", "wanted"),  # prefix, suffix, end token
    [
        ({**GPT2, "bos_token_id": 1, "eos_token_id": 2}, {}, ([1], [], 2)),
        ({**T5, "eos_token_id": 1}, {}, ([], [1], 1)),
        ({**T5, "bos_token_id": 2}, {}, ([], [], None)),
        ({**GPT2, "bos_token_id": 1}, {"tokenizer_config.json": {"add_bos_token": False}}, ([], [], None)),
        (
            {**GPT2, "bos_token_id": 1, "eos_token_id": 2},
            {"tokenizer_config.json": {"add_eos_token": True}},
            ([1], [2], 2),
        ),
        ({**GPT2, "bos_token_id": 1}, {"tokenizer.json": "<s> $A"}, ([9], [], None)),
        ({**T5, "eos_token_id": 1}, {"tokenizer.json": "<s> $A </s>"}, ([9], [10], 1)),
        (GPT2, {"generation_config.json": {"bos_token_id": 1, "eos_token_id": [2]}}, ([1], [], 2)),
        ({**GPT2, "eos_token_id": 2}, {"generation_config.json": {"eos_token_id": [8, 2]}}, ([], [], 2)),
    ],
)
def test_what_is_not_declared_comes_from_the_checkpoint(config, files, wanted, tmp_path):
    made = contract(tmp_path, config, files)
    prompt = made.prompt
    assert (list(prompt.prefix), list(prompt.suffix), prompt.token_map.end_token) == wanted
    assert (list(made.checkpoint.prefix), list(made.checkpoint.suffix), made.checkpoint.end_token) == wanted
    assert all(made.origins[name] for name in ("prefix", "separator", "suffix", "max_items", "end_token"))


@pytest.mark.case("W17")
@pytest.mark.parametrize(
    ("config", "files", "text"),
    [
        ({**GPT2, "bos_token_id": 50256}, {}, r"prefix: bos_token_id of config\.json: \[50256\] lies outside .* of 40"),
        ({**GPT2, "bos_token_id": 4}, {}, r"prefix: .*\[4\], is the token of a code: not taken"),
        (
            {**GPT2, "bos_token_id": 1},
            {"generation_config.json": {"bos_token_id": 9}},
            r"bos_token_id: \[1\] in config\.json, \[9\] in generation_config\.json: not one token",
        ),
        ({**GPT2, "eos_token_id": [1, 2]}, {}, r"eos_token_id: \[1, 2\] in config\.json: not one token"),
        ({**GPT2, "max_position_embeddings": 6}, {}, "max_items: .* take up to 7 positions, the model has seen 6"),
        (GPT2, {"generation_config.json": {"suppress_tokens": [4, 9, 21]}}, "forbids 2 tokens of codes"),
        (GPT2, {"generation_config.json": {"repetition_penalty": 1.2}}, "repetition_penalty: not applied"),
        (
            T5,
            {"generation_config.json": {"decoder_start_token_id": 9}},
            r"0 in config\.json, 9 in generation_config\.json",
        ),
    ],
)
def test_what_does_not_fit_is_remarked_on_and_not_taken(config, files, text, tmp_path):
    made = contract(tmp_path, config, files)
    assert len([remark for remark in made.remarks if re.search(text, remark)]) == 1, made.remarks
    assert made.prompt.prefix == made.prompt.suffix == ()
    assert made.prompt.token_map.end_token is None


@pytest.mark.case("W17")
def test_a_missing_bos_or_eos_is_remarked_on_whoever_left_it_out(tmp_path):
    declared = {"prefix": "tokens.json", "suffix": "tokens.json", "end_token": "tokens.json"}
    for config, text in (
        ({**GPT2, "bos_token_id": 1}, r"prefix: the checkpoint puts [1] in front of a prompt, the template puts []"),
        ({**T5, "eos_token_id": 1}, r"suffix: the checkpoint puts [1] behind a prompt, the template puts []"),
        (GPT2, "prefix: nothing stands in front of the first item (no BOS)"),
    ):
        made = contract(tmp_path, config, declared=declared)
        assert made.prompt == PROMPT
        spec = RetrieverSpec(config["model_type"], VOCAB_SIZE, 20, made.prompt, checkpoint=made.checkpoint)
        (remark,) = spec.remarks()
        assert text in remark
        saved = spec.save(tmp_path, [])
        assert RetrieverSpec.load(tmp_path).remarks() == saved.remarks() == [remark]


def test_scores_by_level_get_no_end_token_that_nobody_declared(tmp_path):
    made = contract(tmp_path, {**GPT2, "eos_token_id": 2}, normalise="level")
    assert made.prompt.token_map.end_token is None
    assert "by level" in made.origins["end_token"]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("config.json", '{"bos_token_id": "1"}', r"config\.json: bos_token_id: expected a token .* got '1'"),
        ("config.json", '{"eos_token_id": [1, true]}', r"config\.json: eos_token_id: expected a token"),
        ("generation_config.json", "[1]", r"generation_config\.json: expected an object, got list"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: not readable"),
        ("tokenizer.json", "{}", r"tokenizer\.json: not readable"),
    ],
)
def test_a_damaged_file_about_prompts_is_named(name, content, text, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(content)
    with pytest.raises(ExportError, match=text):
        read_said(tmp_path)


def test_a_start_token_that_only_generation_config_names_is_taken(tmp_path):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB_SIZE, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=3
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "decoder_start_token_id": None}))
    assert load_checkpoint(tmp_path, FAMILIES).config.decoder_start_token_id == 3
    assert read_said(tmp_path).start_token == 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    gpt2().save_pretrained(folder)
    return folder


def add(*names: str, content: str = "{}"):
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content)

    return change


@pytest.mark.case("W14")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (add("adapter_config.json", "adapter_model.safetensors"), r"adapter_config\.json: .* merge the adapter first"),
        (add("adapter_model.bin"), r"adapter_model\.bin: .* merge the adapter first"),
        (add("quantize_config.json"), r"quantize_config\.json: the weights are quantised"),
        (
            add("config.json", content='{"model_type": "gpt2", "quantization_config": {"bits": 4}}'),
            r"config\.json: quantization_config: the weights are quantised",
        ),
        (add("model-00001-of-00002.safetensors"), r"two sets of weights, model\.safetensors and model-00001-of-00002"),
        (
            add("model.safetensors.index.json", content='{"weight_map": {"a": "part-1.safetensors"}}'),
            r"part-1\.safetensors: missing",
        ),
        (
            add("model.safetensors.index.json", content='{"weight_map": {"a": "../x.safetensors"}}'),
            r"expected names of files beside it, got '\.\./x\.safetensors'",
        ),
        (
            add("model.safetensors.index.json", content='{"weight_map": {"a": "model.safetensors"}}'),
            r"two sets of weights, model\.safetensors and model\.safetensors\.index\.json",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors"),
            r"index\.json: missing; expected it beside model-00001-of-00001",
        ),
        (
            lambda folder: (
                (folder / "checkpoint-5").mkdir(),
                (folder / "model.safetensors").rename(folder / "checkpoint-5" / "model.safetensors"),
            ),
            "model.safetensors: missing; .* there are weights in checkpoint-5/",
        ),
    ],
)
def test_weights_that_are_not_the_whole_model_are_refused(checkpoint, change, text, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    change(folder)
    with pytest.raises(ExportError, match=text):
        weight_files(folder)


def test_other_weights_in_the_folder_are_named(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    add("pytorch_model.bin", "model.gguf", "checkpoint-5/model.safetensors", "logs/events")(folder)
    assert left_unread(folder, weight_files(folder)) == ["model.gguf", "pytorch_model.bin", "checkpoint-5/"]


@pytest.mark.parametrize(
    ("tied", "text"), [(True, "ties the head .* of its own"), (False, "does not tie .* is missing")]
)
def test_a_head_that_config_and_weights_tell_apart_is_refused(checkpoint, tied, text, tmp_path):
    folder = tmp_path / "t5"
    config = transformers.T5Config(
        vocab_size=VOCAB_SIZE, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("scale_decoder_outputs")  # as releases before 5 wrote it
    (folder / "config.json").write_text(json.dumps({**fields, "tie_word_embeddings": tied}))
    if tied:
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = weights["shared.weight"] + 1
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=text):
        load_checkpoint(folder, FAMILIES)


def adoptable(folder: Path, **options) -> tuple[torch.nn.Module, Path]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    return model, optimum_layout.write_decoder_only(model, folder, PROMPT.longest + 3, **options)


@pytest.mark.case("W16")
def test_adopted_graphs_whose_scores_depend_on_the_other_prompts_of_a_batch_are_refused(tmp_path):
    _, folder = adoptable(tmp_path / "mask")
    found = adopt_optimum(folder, tmp_path / "retriever", PROMPT)
    assert found.by_company is not None
    assert found.by_company < 1e-4
    # The mask becomes the number of places that it shows, so that tokens behind a gap of padding are not read.
    _, folder = adoptable(tmp_path / "lengths", by_lengths=True)
    with pytest.raises(ExportError, match=r"change by up to .* with the lengths of the other prompts in its batch"):
        adopt_optimum(folder, tmp_path / "another", PROMPT)
    assert not (tmp_path / "another").exists()


@pytest.mark.case("W15")
@pytest.mark.parametrize("attributes", [False, True])
def test_weights_beside_a_merged_decoder_are_taken_wherever_a_branch_names_them(attributes, tmp_path):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB_SIZE, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    folder = optimum_layout.write_encoder_decoder(model, tmp_path / "graphs", PROMPT.longest + 3)
    optimum_layout.merge_decoders(folder)
    graph = folder / "decoder_model_merged.onnx"
    whole = onnx.load(str(graph))
    graph.unlink()
    onnx.save_model(
        whole, str(graph), save_as_external_data=True, location="branches.data", size_threshold=1024,
        convert_attribute=attributes,
    )  # fmt: skip
    assert not onnx.load(str(graph), load_external_data=False).graph.initializer  # all of it lies in the branches
    found = adopt_optimum(folder, tmp_path / "retriever", PROMPT, model=model)
    assert found.largest_difference is not None
    assert found.largest_difference < 5e-5
    assert (tmp_path / "retriever" / "branches.data").is_file()
    (folder / "branches.data").rename(folder / "other.data")
    with pytest.raises(ExportError, match=r"branches\.data: missing, though decoder_model_merged\.onnx names it"):
        adopt_optimum(folder, tmp_path / "another", PROMPT)


OVERLAPPING = [{"start": 2, "size": 256}, {"start": 257, "size": 256}, {"start": 513, "size": 256}]


@pytest.mark.case("W50")
def test_levels_share_tokens_only_where_the_declaration_says_so(tmp_path):
    with pytest.raises(ValueError, match="token 257 stands for code 255 of level 0 and for code 0 of level 1"):
        TokenMap.from_json(OVERLAPPING)
    for some, others, token in (((9, 4), (4, 3), 4), (range(3, 6), (8, 5), 5), ((8, 5), range(3, 6), 5)):
        with pytest.raises(
            ValueError, match=f"token {token} stands for code 1 of level 0|token {token} stands for code"
        ):
            TokenMap((some, others))
    with pytest.raises(ValueError, match="shared_tokens: expected true or false, got 1"):
        TokenMap.from_json(OVERLAPPING, shared_tokens=1)
    shared = TokenMap.from_json(OVERLAPPING, shared_tokens=True)
    spec = RetrieverSpec("t5", 1000, 60, PromptTemplate(shared, 3)).save(tmp_path, [])
    assert RetrieverSpec.load(tmp_path) == spec
    assert spec.token_map.shared_tokens


@pytest.mark.case("W50")
def test_opening_a_bundle_checks_what_building_it_checks(tiny_bundle, tmp_path):
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    file = bundle / "retriever" / "retriever.json"
    fields = json.loads(file.read_text())
    fields["token_map"][1]["start"] -= 1
    file.write_text(json.dumps(fields))
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"]["retriever/retriever.json"] = describe_file(file)
    manifest["bundle_id"] = compute_bundle_id(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        BundleError, match=r"retriever\.json: .* stands for code 7 of level 0 and for code 0 of level 1"
    ):
        Bundle.open(bundle)


def modules(model: torch.nn.Module) -> Retriever:
    graphs = FAMILIES[model.config.model_type](model, Limits(PROMPT.longest, 2), "vocabulary")
    spec = RetrieverSpec(model.config.model_type, VOCAB_SIZE, PROMPT.longest, PROMPT, engine="torch")
    return Retriever(spec, TorchEngine(graphs.prefill, graphs.decode))


@pytest.mark.case("W59")
@pytest.mark.parametrize("size", [1.0, 1e4, 1e30])
def test_differences_of_large_logits_are_relative_and_still_seen(size):
    model, other = gpt2(tie_word_embeddings=False), gpt2(tie_word_embeddings=False)
    with torch.no_grad():
        for one in (model, other):
            one.lm_head.weight.mul_(size * 100)
        other.transformer.wte.weight[:, 5] += 0.05
    assert largest_difference(model, modules(model)) < 1e-3
    assert largest_difference(model, modules(other)) > 1e-3


def write_samples(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_own_prompts_are_compared_by_differences_and_lists(tmp_path):
    model, other = gpt2(initializer_range=0.3), gpt2(initializer_range=0.3)
    with torch.no_grad():
        other.transformer.ln_f.bias += 1.0
    retriever = modules(model)
    history = [[4, 6], [0, 0], [2, 5]]
    path = write_samples(
        tmp_path / "samples.jsonl",
        {"history": history[:1]},
        {"history": history, "input_ids": [7, 26, 3, 20, 5, 25]},
        {"input_ids": [1, 1, 9]},
    )
    samples = read_samples(path, retriever.spec)
    same, differs = compare(model, retriever, samples), compare(other, retriever, samples)
    assert (same.prompts, same.equal_lists, same.unchecked) == (3, 3, 1)
    assert same.largest_difference < 5e-5
    assert differs.largest_difference > 0.1
    assert differs.equal_lists < 3


@pytest.mark.case("W17")
@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            {"history": [[4, 6]], "input_ids": [1, 7, 26]},
            r"from place 0 on: it makes \[7, 26\] .*, expected \[1, 7, 26\]",
        ),
        ({"history": [[4, 6]], "input_ids": [7, 26, 1]}, r"from place 2 on: it makes \[\] .*, expected \[1\]"),
        ({"history": [50, 172]}, r"history: expected semantic IDs, a list of 2 codes .* got \[50, 172\]"),
        ({"history": [[4, 7]]}, "level 1: expected 0 <= code < 7, got 7"),
        ({"history": [[4]]}, r"item 0: expected 2 codes of 0 or more, got \[4\]"),
        ({"history": []}, "history: expected 1 to 6 tokens, got 0"),
        ({"input_ids": [40]}, "input_ids: expected tokens 0 <= token < 40, got 40 at place 0"),
        ({"input_ids": [1.5]}, r"input_ids: expected a list of tokens, got \[1\.5\]"),
        ({"inputs": [1]}, "expected an object with history or input_ids"),
    ],
)
def test_a_sample_that_is_not_what_the_template_makes_is_refused_by_its_line(line, text, tmp_path):
    spec = RetrieverSpec("gpt2", VOCAB_SIZE, PROMPT.longest, PROMPT)
    path = write_samples(tmp_path / "samples.jsonl", {"input_ids": [3]}, line)
    with pytest.raises(ValueError, match=rf"samples\.jsonl: line 2: {text}|samples\.jsonl: line 2: .*{text}"):
        read_samples(path, spec)
    path.write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(ValueError, match=r"samples\.jsonl: expected JSON Lines in UTF-8"):
        read_samples(path, spec)


def run(*arguments: object):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.case("W17")
def test_ones_own_model_goes_all_the_way(tmp_path):
    """The example of builder/PROMPT.md, trained for a few steps, through the commands that stand there."""
    script = ROOT / "builder" / "examples" / "train_own_model.py"
    subprocess.run([sys.executable, script, tmp_path, "--steps", "3"], check=True, capture_output=True, timeout=300)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    (tmp_path / "few.jsonl").write_text("\n".join(lines[:9]))
    options = ["--token-map", tmp_path / "tokens.json", "--out", tmp_path / "retriever"]
    declared = json.loads((tmp_path / "tokens.json").read_text())
    (tmp_path / "bare.json").write_text(json.dumps({**declared, "prompt": {"max_items": 8, "prefix": []}}))
    bare = run(
        "export", tmp_path / "checkpoint", "--token-map", tmp_path / "bare.json", "--out", tmp_path / "retriever",
        "--check-with", tmp_path / "few.jsonl",
    )  # fmt: skip
    assert bare.exit_code == 1
    assert "few.jsonl: line 1: the template makes another prompt" in bare.output

    made = run("export", tmp_path / "checkpoint", *options, "--check-with", tmp_path / "few.jsonl")
    assert made.exit_code == 0, made.output
    assert "[1] (bos_token_id of config.json)" in made.output
    assert "equal lists of ten 9 of 9 (100.0%)" in made.output
    spec = RetrieverSpec.load(tmp_path / "retriever")
    assert spec.prompt.prefix == (1,)
    assert spec.checkpoint == Framing(prefix=(1,))
    built = run(
        "build", tmp_path / "items.parquet", "--retriever", tmp_path / "retriever", "--set", "in_stock",
        "--out", tmp_path / "bundle",
    )  # fmt: skip
    assert built.exit_code == 0, built.output
    published = run("publish", tmp_path / "bundle", tmp_path / "repository", "--triton", "none", "--no-preflight")
    assert published.exit_code == 0, published.output
    bundle = Bundle.open(tmp_path / "bundle")
    sample = json.loads(lines[0])
    assert spec.prompt.tokens(np.array(sample["history"])).tolist() == sample["input_ids"]

    shown = subprocess.run(
        [sys.executable, "-m", "trieton_builder", "inspect", tmp_path / "bundle"],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    for text in (
        bundle.bundle_id,
        spec.fingerprint,
        "gpt2",
        "1 | item, item, ...",
        "tokens 10 to 17",
        "in_stock",
        "none",
    ):
        assert text in shown, shown
    assert "remark" not in shown
    as_json = json.loads(run("inspect", tmp_path / "bundle", "--json").stdout)
    assert as_json["bundle"]["bundle_id"] == bundle.bundle_id
    assert as_json["retriever"] == {**spec.to_json(), "remarks": []}
    alone = run("inspect", tmp_path / "retriever")
    assert spec.fingerprint in alone.output
    part = run("inspect", tmp_path / "bundle" / "index.safetensors")
    assert part.exit_code == 1
    assert "a part of the bundle" in part.output


@pytest.mark.case("W51")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing(number, checkpoint, tmp_path):
    (tmp_path / "tokens.json").write_text(json.dumps(PROMPT.token_map.to_json()))
    command = ["export", checkpoint, "--token-map", tmp_path / "tokens.json", "--out", tmp_path / "out" / "retriever"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trieton_builder", *command, "--max-items", "3"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not list((tmp_path / "out").glob(".retriever.partial-*")):  # it writes the graphs now
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert "trieton: interrupted" in said
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ProcessLookupError):  # nobody of its group lives on
        os.killpg(process.pid, 0)
