"""All that a GPU has to show, in one command of a few minutes: tests/gpu, the table of steps, and whole searches.

    python tests/benchmarks/gpu_check.py [--max-items 1e7] [--reference CHECKOUT]

Installs nothing and reaches no network: it runs where torch, OpenAI Triton, NumPy, numba, safetensors, onnxruntime and
pytest are, from a checkout; whole searches need the exporter too (transformers, onnx-ir). Leaves its results in $OUT,
or in .bench/.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS_SECONDS, TABLE_SECONDS, SEARCH_SECONDS = 170, 120, 90


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-items", default="1e7")
    parser.add_argument("--reference")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("gpu-check: torch is not installed for this Python; name another with: make PYTHON=... gpu-check")
        return 1
    if not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA GPU here, so there is nothing to check")
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    out = Path(os.environ.get("OUT", ROOT / ".bench"))
    out.mkdir(parents=True, exist_ok=True)
    packages = [str(ROOT / name) for name in ("python_backend", "builder", "clients", "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*packages, os.environ.get("PYTHONPATH", "")])}
    # The project's own options name plugins of pytest that need not be here.
    tests = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", f"--junitxml={out / 'gpu-tests.xml'}", "tests/gpu"]
    table = [
        sys.executable, "tests/benchmarks/bench_step.py", "--gpu-only", "--max-items", args.max_items,
        "--json", str(out / "gpu-step.json"),
    ]  # fmt: skip
    if args.reference:
        table += ["--reference", args.reference]
    commands = [(tests, TESTS_SECONDS), (table, TABLE_SECONDS)]
    if all(importlib.util.find_spec(name) for name in ("transformers", "onnx_ir", "rich")):
        search = [sys.executable, "tests/benchmarks/gpu_search.py", "--json", str(out / "gpu-search.json")]
        commands.append((search, SEARCH_SECONDS))
    else:
        print("gpu-check: whole searches are left out, the exporter needs transformers, onnx-ir and rich")
    failed = 0
    for command, seconds in commands:
        try:
            failed |= subprocess.run(command, cwd=ROOT, env=environment, timeout=seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"gpu-check: not done after {seconds} s: {' '.join(command)}")
            failed = 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
