# Development commands; `make help` lists them. Each target sets up the virtual environment if needed.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
# The first Python of a tested version; override with PYTHON=...
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && { echo $$p; break; }; done)
# Index for torch; empty: the default index (on Linux its build includes CUDA).
TORCH_INDEX ?=
RANKS ?=
ARGS ?=

# Without GPUs the DeepSpeed launcher counts NUMA nodes as devices, so set two ranks.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
LAUNCH_RANKS = $(if $(RANKS),--num_gpus $(RANKS),$(if $(filter 0,$(GPUS)),--num_gpus 2,))

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all test-gpu image verify story lint format docs bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo; echo "  variables: PYTHON=python3.12  TORCH_INDEX=URL  RANKS=4  ARGS='train.steps=50 zero=stage3'"

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or 3.12 is needed; set it with: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
		$$(grep '^torch==' constraints.txt) numpy$$(sed -n 's/^numpy//p' constraints.txt)
	DS_BUILD_OPS=0 $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,megatron]'
	@touch $@

setup: $(VENV)/.installed  ## create the virtual environment and install everything in it

train: setup  ## train the quickstart with DeepSpeed on real text (minutes), sample from it and plot it
	$(if $(filter 0,$(GPUS)),DS_ACCELERATOR=cpu )$(BIN)/deepspeed --quiet $(LAUNCH_RANKS) launch/train.py +exp=quickstart $(ARGS)

test: setup  ## the quick suite (10 to 13 minutes on two cores)
	$(BIN)/python -m pytest $(ARGS)

test-all: setup  ## also the tests marked full (about an hour on two cores)
	$(BIN)/python -m pytest -m "not gpu and not image" $(ARGS)

test-gpu: setup  ## both engines on one GPU (<= 8 minutes); skipped without a GPU
	$(BIN)/python -m pytest tests/gpu -m gpu $(ARGS)

image: setup  ## build the CPU image without a Docker daemon and train in it (root, buildah, debootstrap)
	$(BIN)/python -m pytest tests/cluster/test_image.py -m image -rs -s $(ARGS)

verify: setup  ## compare both engines with plain torch on every axis, on GPUs or CPU; ARGS='--cells all'
	$(BIN)/python launch/verify.py $(ARGS)

story: setup  ## end-to-end story on CPU: S3 data, sweep, two nodes, a killed rank, another engine, export
	$(BIN)/python -m tests.story $(ARGS)

lint: setup  ## check linting, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## fix linting and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup  ## build the documentation site into site/
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

bench: setup  ## measure the toolkit's overhead against plain scripts (benchmarks/results)
	$(BIN)/python benchmarks/engine_step.py $(ARGS)

clean:  ## remove caches and the virtual environment, but not runs/ and data/
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
