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
# Of the fault campaign.
SEED ?= 1
ARGS ?=
# Processes that share the tests; each test may start up to four ranks of its own.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# A Python that finds every package, installed or in a folder on PYTHONPATH; empty if there is none.
READY = $(shell for p in $(BIN)/python $(PYTHON); do $$p -c "import sys; from importlib.util import find_spec; \
	sys.exit(not all(map(find_spec, 'torch deepspeed megatron.core transformers pytest'.split())))" 2>/dev/null && \
	{ echo $$p; break; }; done)

# Without GPUs the DeepSpeed launcher counts NUMA nodes as devices, so set two ranks.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
LAUNCH_RANKS = $(if $(RANKS),--num_gpus $(RANKS),$(if $(filter 0,$(GPUS)),--num_gpus 2,))

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all test-gpu gpu image verify story campaign lint format docs wheel bench clean

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

test: setup  ## the quick suite (about ten minutes on two cores)
	$(PYTEST) $(ARGS)

test-all: setup  ## also the tests marked full (more than an hour on two cores)
	$(PYTEST) -m "not gpu and not image" $(ARGS)

test-gpu:  ## both engines on one GPU (<= 8 minutes); skipped without a GPU; needs no index if all packages are there
	$(if $(READY),,$(MAKE) setup)
	PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(or $(READY),$(BIN)/python) -m pytest tests/gpu -m gpu $(ARGS)

gpu:  ## parity and throughput of both engines on one GPU (10 minutes); needs no index if all packages are there
	$(if $(READY),,$(MAKE) setup)
	PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(or $(READY),$(BIN)/python) benchmarks/gpu.py $(ARGS)

image: setup  ## build the CPU image without a Docker daemon and train in it (root, buildah, debootstrap)
	$(BIN)/python -m pytest tests/cluster/test_image.py -m image -rs -s $(ARGS)

verify: setup  ## compare both engines with plain torch on every axis; the whole matrix: ARGS='--cells all'
	$(BIN)/python launch/verify.py $(ARGS)

story: setup  ## end-to-end story on CPU: S3 data, sweep, two nodes, a killed rank, another engine, export
	$(BIN)/python -m tests.story $(ARGS)

campaign: setup  ## inject 500 random faults into tiny trainings and check what is left; hours; continues; SEED=7
	$(BIN)/python benchmarks/campaign.py --seed $(SEED) $(ARGS)

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

wheel: setup  ## build a wheel with configuration and commands into dist/
	rm -rf build dist
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@rm -rf build; ls dist/*.whl

bench: setup  ## measure the toolkit's overhead against plain scripts (benchmarks/results)
	$(BIN)/python benchmarks/engine_step.py $(ARGS)

clean:  ## remove caches and the virtual environment, but not runs/ and data/
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
