"""Whole searches on a GPU with the `torch.export` engine: launched level by level, and captured in one CUDA graph.

    python tests/benchmarks/gpu_search.py [--json FILE]

An untrained decoder-only model of 50M parameters in float16 and a catalogue of 1e5 items, B=8, S=512, M=20.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from bench_retriever import LENGTH, SIZES, large_model, median_ms
from trieton.index.static_index import StaticIndex
from trieton.retriever.session import PromptTemplate, Retriever, TokenMap
from trieton.search.beam import beam_search
from trieton.search.captured import CapturedSearch
from trieton_builder.export import export_retriever
from trieton_builder.indexing.trie import build_index

BATCH, BEAMS, ITEMS, REPEATS = 8, 20, 100_000, 30


def measure(folder: Path) -> dict[str, float]:
    prompt = PromptTemplate(TokenMap.contiguous(SIZES, first=3), max_items=10)
    options = {"engine": "torch", "dtype": "float16", "check": False}  # tests/gpu compares
    export_retriever(large_model(), folder / "retriever", prompt, max_length=LENGTH, **options)
    retriever = Retriever.open(folder / "retriever", device="cuda")
    rng = np.random.default_rng(0)
    build_index(rng.integers(0, SIZES[0], (ITEMS, len(SIZES))), codebook_sizes=SIZES).save(folder / "index.safetensors")
    index = StaticIndex.load(folder / "index.safetensors", device="cuda")
    prompts = [rng.integers(3, 32_000, LENGTH) for _ in range(BATCH)]
    captured = CapturedSearch(retriever, index)
    by_level = median_ms(
        lambda: beam_search(retriever.start(prompts), index, batch_size=BATCH, beam_width=BEAMS), REPEATS
    )
    in_graph = median_ms(lambda: captured.search(prompts, BEAMS), REPEATS)
    return {"by_level_ms": by_level, "in_graph_ms": in_graph, "in_graph/by_level": in_graph / by_level}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    print(f"whole search on {torch.cuda.get_device_name()}, B={BATCH} S={LENGTH} M={BEAMS}")
    for name, value in found.items():
        print(f"{name:<20} {value:.3g}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
