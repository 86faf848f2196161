# Everything happens in .venv; nothing is installed outside this folder. PYTHON may name any 3.10-3.12; by default the
# first of these that is one.
ifndef PYTHON
FITS := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))
PYTHON := $(shell for p in python3 python3.12 python3.11 python3.10; do $$p -c '$(FITS)' 2>/dev/null && echo $$p && break; done)
endif
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

.PHONY: help setup demo test test-interpreted lint loadtest soak gpu-check clean \
	bench-index bench-step bench-beam bench-constraints bench-retriever bench-serving bench-client bench-rollout
help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP) ## make .venv and install everything into it

$(STAMP): pyproject.toml deploy/constraints.txt
	@test -n "$(PYTHON)" || { echo "trieton: no Python 3.10-3.12 found as python3, python3.12, python3.11 or python3.10; name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 12) else f"trieton: Python 3.10-3.12 expected, $(PYTHON) is {v[0]}.{v[1]}; name another: make $(MAKECMDGOALS) PYTHON=python3.11")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c deploy/constraints.txt -e '.[dev]'
	$(PIP) install --quiet --no-deps recbole==1.2.1  # for its copy of MovieLens-100k; its own dependencies are not needed
	@touch $@

demo: $(STAMP) ## the whole product at work: train, export, build, publish, ask, swap, roll back
	@$(BIN)/trieton demo

lint: $(STAMP) ## ruff, mypy, and the contracts of the imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## lint, then every test; starts and stops the real server
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist worksteal

test-interpreted: $(STAMP) ## all tests of the GPU kernel without a GPU, under the interpreter; takes long
	TRITON_INTERPRET=1 TRIETON_THOROUGH=1 $(BIN)/python -m pytest --timeout=3600 tests/gpu
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --timeout=3600 -k gpu tests/test_beam.py tests/test_beam_ends.py
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --timeout=3600 tests/test_beam_oracle.py

# Figures, printed and never tested: a machine at work makes them useless, a failed goal does not break a build.
# Options go into ARGS: make bench-index ARGS='--max-items 1e7'
bench-index: $(STAMP) ## size, build, memory and load of the index
bench-step: $(STAMP) ## the constrained search beside unconstrained ones and other exact ones
bench-beam: $(STAMP) ## how wide a beam has to be, with and without constraint
bench-constraints: $(STAMP) ## planes, lists, refresh; over-fetch and filter beside them
bench-retriever: $(STAMP) ## decode with the prompt standing once; equality with Hugging Face
bench-serving: $(STAMP) ## latency and throughput of the real server
bench-client: $(STAMP) ## the client beside plain tritonclient
bench-rollout: $(STAMP) ## swaps under load
bench-index bench-step bench-beam bench-constraints bench-retriever bench-rollout:
	$(BIN)/python tests/benchmarks/$(subst -,_,$@).py $(ARGS)
bench-serving bench-client:
	$(BIN)/python tests/benchmarks/$(subst -,_,$@).py $(if $(wildcard .demo/bundles/all-films),--bundle .demo/bundles/all-films) $(ARGS)

soak: $(STAMP) ## growth of memory and handles under mixed load; SOAK_MINUTES=30
	$(BIN)/python tests/benchmarks/soak.py $(ARGS)

loadtest: $(STAMP) ## Locust against the demo's repository; report in loadtest/report/
	$(BIN)/python loadtest/run.py $(ARGS)

gpu-check: ## what a GPU has to show; uses $(PYTHON) as it is, installs nothing
	$(or $(PYTHON),python3) tests/benchmarks/gpu_check.py $(ARGS)

clean: ## remove what the demo and the benchmarks made (not .venv)
	rm -rf .demo .bench loadtest/report
