# Thin wrappers: inside the environment `python train.py` with Hydra overrides is the interface.
.DEFAULT_GOAL := help
.PHONY: help setup train test evidence evidence-quick evidence-full test-slow test-gpu lint report base clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Newest run folder, for `make report`.
RUN ?= $(patsubst %/events.jsonl,%,$(firstword $(shell ls -t outputs/*/*/events.jsonl outputs/*/*/*/events.jsonl 2>/dev/null)))

help: ## Show this list.
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Create .venv and install the pinned requirements; does nothing if they are there.

$(INSTALLED): requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --requirement requirements.txt
	touch $@

train: setup ## Train; overrides go into ARGS: make train ARGS="seed=2 planner.seeds_per_prompt=16".
	$(BIN)/python train.py $(ARGS)

test: setup ## Run the fast tests.
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-slow: setup ## Run the tests of many processes and long runs.
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

test-gpu: setup ## Run the tests that need a CUDA device; without one they are skipped and say so.
	$(BIN)/python -m pytest -m gpu -rs $(ARGS)

lint: setup ## Check style, formatting and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

report: setup ## Write RUN/report.html; RUN is the newest run folder by default.
	$(if $(RUN),,$(error No run folder under outputs/: `make train` first, or give RUN=<folder>))
	$(BIN)/python -m src.report $(RUN)

evidence-quick: setup ## Compare whole systems on virtual clusters, in minutes (docs/evidence.md).
	$(BIN)/python -m benchmarks.evidence --quick --out outputs/evidence-quick

evidence: setup ## The same with all systems, seeds and markets: two hours and a half on two cores.
	$(BIN)/python -m benchmarks.evidence

evidence-full: setup ## And the ablations: hours.
	$(BIN)/python -m benchmarks.evidence --full --table

base: setup ## Make the shipped base weights and recognisers again.
	$(BIN)/python train.py -m experiment=pretrain_text,pretrain_digits,pretrain_shapes

clean: ## Remove caches; runs and the environment stay.
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
