"""The exported retriever: a prompt for all beams or per beam, Hugging Face's lists, the share of the beam step.

    .venv/bin/python tests/benchmarks/bench_retriever.py [--demo .demo] [--people 50] [--repeats 5] [--skip-large]

1. An untrained decoder-only model of 50M parameters, B=2, S=512, M=64, on two engines: our graphs, and the same model
   in Optimum's layout, whose keys and values stand once per beam.
2. The demo's trained model against Hugging Face's beam search with `prefix_allowed_tokens_fn`.
3. The demo's model at B=8, M=20: how much of a level is the beam step.

Parts 2 and 3 need `make demo` before. Medians in ms; files lie in .bench/retriever.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from trieton.bundle import Bundle
from trieton.retriever.session import PromptTemplate, Retriever, TokenMap
from trieton.search.beam import beam_search

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".bench" / "retriever"
sys.path.insert(0, str(ROOT / "tests"))
BATCH, LENGTH, BEAMS = 2, 512, 64
SIZES = (256, 256, 256)
console = Console(highlight=False)


def median_ms(function: Callable[[], Any], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return 1e3 * float(np.median(times))


# ---- 1: one prompt for all beams


def large_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config).eval()


def prompt_once_against_per_beam(repeats: int) -> dict[str, float]:
    from optimum_layout import write_decoder_only
    from trieton_builder.export import export_retriever
    from trieton_builder.export.optimum import adopt_optimum

    prompt = PromptTemplate(TokenMap.contiguous(SIZES, first=3), max_items=10)
    ours, theirs = WORK / "shared", WORK / "per-beam"
    model = large_model()
    if not ours.is_dir():
        with console.status("exporting a model of 50M parameters ..."):
            export_retriever(model, ours, prompt, max_length=LENGTH)
    if not theirs.is_dir():
        with console.status("exporting it in Optimum's layout ..."):
            graphs = write_decoder_only(model, WORK / "graphs", LENGTH + 3)
            adopt_optimum(graphs, theirs, prompt, max_length=LENGTH)
            shutil.rmtree(graphs)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 32_000, LENGTH) for _ in range(BATCH)]
    codes = rng.integers(0, SIZES[0], (BATCH, BEAMS))
    parents = np.tile(np.arange(BEAMS), (BATCH, 1))[:, rng.permutation(BEAMS)]

    def decode_times(folder: Path) -> tuple[list[float], list[np.ndarray], float]:
        retriever = Retriever.open(folder)
        times: list[float] = []
        for _ in range(repeats + 1):
            session = retriever.start(prompts)
            session(0, None, None)
            session(1, codes, np.zeros_like(codes))  # one parent becomes all beams: not yet the steady step
            started = time.perf_counter()
            logits, log_z = session(2, codes, parents)
            times.append(1e3 * (time.perf_counter() - started))
        prefill = median_ms(lambda: retriever.start(prompts), repeats)
        return times[1:], [logits - log_z[..., None]], prefill

    shared, mine, shared_prefill = decode_times(ours)
    per_beam, others, per_beam_prefill = decode_times(theirs)
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // 8) * 4
    once = BATCH * (LENGTH + BEAMS * 2) * per_token
    repeated = BATCH * BEAMS * (LENGTH + 2) * per_token
    return {
        "parameters_million": sum(p.numel() for p in model.parameters()) / 1e6,
        "decode_ms": float(np.median(shared)),
        "decode_per_beam_ms": float(np.median(per_beam)),
        "faster": float(np.median(per_beam) / np.median(shared)),
        "keys_values_mb": once / 1e6,
        "keys_values_per_beam_mb": repeated / 1e6,
        "smaller": repeated / once,
        "prefill_ms": shared_prefill,
        "prefill_per_beam_ms": per_beam_prefill,
        "largest_difference": float(np.abs(mine[0] - others[0]).max()),
    }


# ---- 2 and 3: the demo's trained model


def demo_against_hugging_face(demo: Path, people: int) -> dict[str, float]:
    import hugging_face
    from trieton_builder.demo.movielens import load_movielens
    from trieton_builder.demo.train import load_model

    bundle = Bundle.open(demo / "bundles" / "all-films", verify=False)
    retriever, model, data = bundle.load_retriever(), load_model(demo / "checkpoint"), load_movielens()
    index, spec = bundle.index, retriever.spec
    codes = index.leaf_codes(np.arange(index.num_leaves))
    of_row = index.leaf_codes(index.catalog.leaves(index.catalog.positions(data.item_ids)))
    equal = ties = 0
    worst = 0.0
    chosen = np.linspace(0, data.num_people - 1, people).astype(int)
    for person in chosen:
        prompt = spec.prompt.tokens(of_row[data.histories[person]])
        found = beam_search(retriever.start([prompt]), index, batch_size=1, beam_width=20)
        sequences, scores = hugging_face.beam_search(model, prompt, codes, spec.token_map, 20)
        mine = [tuple(row) for row in found.codes[0].tolist()]
        worst = max(worst, float(np.abs(found.scores[0] - scores).max()))
        equal += mine == sequences
        ties += mine != sequences and sorted(mine) == sorted(sequences)
    return {"people": people, "equal": equal, "same_set_other_order": ties, "largest_difference": worst}


def share_of_the_step(demo: Path, repeats: int) -> dict[str, float]:
    bundle = Bundle.open(demo / "bundles" / "all-films", verify=False)
    retriever, index = bundle.load_retriever(), bundle.index
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, retriever.spec.vocab_size, retriever.spec.max_length) for _ in range(8)]
    inside: dict[int, list[float]] = {}
    whole = []

    class Timed:
        """The session, with the seconds that its calls take."""

        def __init__(self) -> None:
            self.session = retriever.start(prompts)

        def __call__(self, level: int, codes: Any, parents: Any) -> Any:
            started = time.perf_counter()
            answer = self.session(level, codes, parents)
            inside.setdefault(level, []).append(time.perf_counter() - started)
            return answer

    for _ in range(40 + 20 * repeats):
        timed = Timed()
        started = time.perf_counter()
        beam_search(timed, index, batch_size=8, beam_width=20)
        whole.append(time.perf_counter() - started)
    decode = 1e3 * float(np.median([np.median(times[40:]) for level, times in inside.items() if level]))
    calls = 1e3 * sum(float(np.median(times[40:])) for times in inside.values())
    step = (1e3 * float(np.median(whole[40:])) - calls) / index.num_levels
    return {"decode_ms": decode, "step_ms": step, "share": step / decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=ROOT / ".demo")
    parser.add_argument("--people", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip-large", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, float]] = {}
    if not args.skip_large:
        found["prompt once or per beam"] = prompt_once_against_per_beam(args.repeats)
    if (args.demo / "bundles" / "all-films").is_dir():
        found["demo's model and Hugging Face"] = demo_against_hugging_face(args.demo, args.people)
        found["beam step beside a decode step, B=8, M=20"] = share_of_the_step(args.demo, args.repeats)
    else:
        console.print(f"{args.demo}: no demo there; run `make demo` for the parts about its model")
    for title, figures in found.items():
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False)
        for name, value in figures.items():
            table.add_row(name, f"{value:.3g}" if isinstance(value, float) else str(value))
        console.print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
