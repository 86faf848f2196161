# Everything happens in .venv; nothing is installed outside this folder. PYTHON may name any 3.10-3.12.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

.PHONY: help setup demo test lint clean
help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP) ## make .venv and install everything into it

$(STAMP): pyproject.toml deploy/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 12) else f"trieton: Python 3.10-3.12 expected, $(PYTHON) is {v[0]}.{v[1]}; name another with: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c deploy/constraints.txt -e '.[dev]'
	$(PIP) install --quiet --no-deps recbole==1.2.1  # for its copy of MovieLens-100k; its own dependencies are not needed
	@touch $@

demo: $(STAMP) ## the whole product at work: train, export, build, publish, ask, swap, roll back
	@$(BIN)/trieton demo

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## lint, then every test; starts and stops the real server
	$(BIN)/python -m pytest

clean: ## remove what the demo and the benchmarks made (not .venv)
	rm -rf .demo .bench loadtest/report
