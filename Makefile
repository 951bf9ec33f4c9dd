# Every target sets itself up: the first call makes .venv and installs, later calls start at once.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
PYTEST := $(BIN)/python -m pytest
# Tests that start ranks run one after another, the others beside them: tests/conftest.py. One thread a process: they are many.
# They cache bytecode even where the environment turns that off: hundreds of interpreters import the same files.
TESTS  := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTEST) --numprocesses 2 --dist loadscope
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help setup demo test check test-all slurm slurm-packages verify-all bench gpu gpu-wheels format clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once; a minute or two)"
	@$(PIP) -c constraints.txt --editable '.[dev]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@$(PIP) -c constraints.txt setuptools wheel ninja accelerate datasets lightning peft pytorch-ignite trl
	@$(PIP) -c constraints.txt --no-build-isolation deepspeed
	@touch $@

setup: $(STAMP) ## make .venv and install with the tested versions

demo: $(STAMP) ## learn Python from its own standard library: two processes, ZeRO-3, five minutes at most
	@$(BIN)/python -m recipes.demo

test: $(STAMP) ## all tests but the long suites
	@$(TESTS) --max-suite-reruns 3 --rerun-show-tracebacks -m "not long and not gpu"

check: $(STAMP) ## format, lint, types, layers, doctests, unit tests
	@$(BIN)/ruff format --check src tests benchmarks recipes
	@$(BIN)/ruff check src tests benchmarks recipes
	@$(BIN)/mypy
	@$(PYTEST) -q -m "not long" tests/architecture tests/unit src --doctest-modules

test-all: $(STAMP) ## everything, once: the full layout matrix, soaks and fuzzers, with new random examples
	@$(TESTS) -p no:rerunfailures --hypothesis-profile=exploring

slurm-packages: ## install Slurm for its tests, on Debian and as root; its daemons are not started
	@apt-get update --quiet=2
	@DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends slurm-wlm iproute2

slurm: $(STAMP) ## jobs under a real Slurm of four nodes on this machine, as root: ten minutes (after make slurm-packages)
	@$(TESTS) tests/slurm

verify-all: $(STAMP) ## gradients of every layout, pair and triple of parallelisms against one process: the whole matrix
	@$(BIN)/shardwright verify --all

bench: $(BENCH_STAMP) ## tokens/s and memory against a plain loop, DeepSpeed and Trainer, on two CPU ranks; audit of released trainers
	@$(BIN)/python -m benchmarks.cpu --publish
	@$(BIN)/python -m benchmarks.audit_findings
	@$(BIN)/python -m benchmarks.audit_findings --publish

gpu: ## what one GPU can show, with the given Python (PYTHON=...); PART=3/12 runs a part of under nine minutes; installs nothing
	@PYTHONPATH=src:.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.gpu_parts $(if $(PART),--part $(PART)) $(ARGS)

gpu-wheels: ## download the packages that make gpu needs beside torch to build/gpu-wheels, under 64 MiB (GPU_PYTHON=3.12)
	@$(PYTHON) -m benchmarks.gpu_packages download build/gpu-wheels $(if $(GPU_PYTHON),--python $(GPU_PYTHON))

format: $(STAMP) ## rewrite in house style
	@$(BIN)/ruff check --fix -q src tests benchmarks recipes
	@$(BIN)/ruff format src tests benchmarks recipes

clean: ## remove what the targets made
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
