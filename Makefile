# make demo      the operator at work on what this machine has, and a tiny model that learns for a minute (makes .venv)
# make test      lint, types, documentation, kernels, wheel, tests at both ends of the jax range (makes .venv-dev, .venv-newest, .venv-wheel)
# make kernels   the library and the kernels, into jaxqla/lib; needs no GPU
# make wheel     kernels and package, into dist/
# make docs      the documentation, into build/site
# make lint      formatting, lint, types, import contracts;  make format  puts the first right
# make gpu-test  the tests that need a Hopper GPU
#
# PYTHON=python3 makes demo, docs, kernels, lint and gpu-test use that interpreter and what it has installed, and install nothing.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test kernels wheel check-wheel lint docs format test-oldest test-newest gpu-test clean

OLDEST_JAX := 0.10.2
PARALLEL := --numprocesses=auto --maxprocesses=4
CXX_FILES := $(shell find ffi kernels -name "*.cc" -o -name "*.h" -o -name "*.cuh" 2>/dev/null)
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
STEP := $(CURDIR)/.ci/step
PIP := -m pip install --quiet --disable-pip-version-check

PYTHON ?=
USER_PY := $(or $(PYTHON),$(CURDIR)/.venv/bin/python)
DEV_PY := $(or $(PYTHON),$(CURDIR)/.venv-dev/bin/python)
DEV_BIN := $(if $(PYTHON),$(dir $(shell command -v $(PYTHON))),.venv-dev/bin/)
USER_ENV := $(if $(PYTHON),,.venv/.ready)
DEV_ENV := $(if $(PYTHON),,.venv-dev/.ready)

# A driver from 580 on runs CUDA 13. Without an NVIDIA GPU both are empty.
CUDA_EXTRA = $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | awk -F. 'NR == 1 {print ($$1 >= 580) ? ",cuda13" : ",cuda12"}')
HOPPER = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -m 1 '^9\.0')

help:
	@sed -n 's/^# //p;/^$$/q' Makefile

# ---- environments

.venv/.ready: pyproject.toml
	@python=$$(.ci/find-python 3.12 3.13 3.11 3.14) && $(STEP) "environment .venv" $$python -m venv --clear .venv
	@$(STEP) "jax and jaxqla into .venv" .venv/bin/python $(PIP) -e '.[demo$(CUDA_EXTRA)]'
	@touch $@

# torch goes first: tilelang would else bring in the newest.
.venv-dev/.ready: pyproject.toml
	@python=$$(.ci/find-python 3.11 3.12 3.13) && $(STEP) "environment .venv-dev" $$python -m venv --clear .venv-dev
	@$(STEP) "$(TORCH) into .venv-dev" .venv-dev/bin/python $(PIP) $(TORCH)
	@$(STEP) "jax $(OLDEST_JAX), tilelang and tools into .venv-dev" .venv-dev/bin/python $(PIP) jax==$(OLDEST_JAX) -e '.[bench,build,docs,examples,lint,models,test]'
	@touch $@

.venv-newest/.ready: pyproject.toml
	@python=$$(.ci/find-python 3.12) && $(STEP) "environment .venv-newest" $$python -m venv --clear .venv-newest
	@$(STEP) "the newest jax into .venv-newest" .venv-newest/bin/python $(PIP) -e '.[bench,models,test]'
	@touch $@

# ---- what people run

# Kernels only where they can run, and only if neither this checkout nor a wheel in dist/ has them.
demo: $(USER_ENV)
	@if [ -n "$(HOPPER)" ] && [ ! -e jaxqla/lib/manifest.json ] && ! (cd examples && $(USER_PY) -c 'import importlib.util as u, pathlib, sys; sys.exit(not pathlib.Path(u.find_spec("jaxqla").origin, "../lib/manifest.json").resolve().exists())' 2>/dev/null); then \
	  if ls dist/*.whl >/dev/null 2>&1; then unzip -qo "$$(ls -t dist/*.whl | head -1)" 'jaxqla/lib/*'; else $(MAKE) --no-print-directory kernels PYTHON=; fi; \
	fi
	@cd examples && if ! $(USER_PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("jaxqla") is None)'; then export PYTHONPATH=..; fi; $(USER_PY) demo.py

test: lint docs kernels check-wheel test-newest test-oldest

kernels: $(DEV_ENV)
	@$(DEV_PY) -m kernels.build

wheel: kernels
	@rm -rf dist
	@$(STEP) "wheel into dist/" $(DEV_PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls -l dist/*.whl | awk '{printf "    %s, %.1f MB\n", $$NF, $$5 / 1e6}'

# A user's machine: the wheel and jax, and nothing else of ours.
check-wheel: wheel
	@$(STEP) "environment .venv-wheel" $(DEV_PY) -m venv --clear .venv-wheel
	@$(STEP) "the wheel into .venv-wheel" .venv-wheel/bin/python $(PIP) dist/*.whl jax==$(OLDEST_JAX)
	@cd dist && JAX_PLATFORMS=cpu $(STEP) "quickstart from the wheel, without TileLang and torch" ../.venv-wheel/bin/python -W error ../examples/quickstart.py

lint: $(DEV_ENV)
	@$(STEP) "ruff format" $(DEV_BIN)ruff format --check .
	@$(STEP) "ruff check" $(DEV_BIN)ruff check .
	@$(STEP) "clang-format" $(DEV_BIN)clang-format --dry-run --Werror $(CXX_FILES)
	@$(STEP) "pyright" $(DEV_BIN)pyright --pythonpath $(DEV_PY)
	@$(STEP) "import contracts" $(DEV_BIN)lint-imports

docs: $(DEV_ENV)
	@NO_MKDOCS_2_WARNING=1 $(STEP) "documentation into build/site" $(DEV_BIN)mkdocs build --strict --quiet

format: $(DEV_ENV)
	@$(DEV_BIN)ruff format . && $(DEV_BIN)ruff check --fix .
	@$(DEV_BIN)clang-format -i $(CXX_FILES)

# ---- tests

test-oldest: $(DEV_ENV)
	@echo "==> tests on jax $(OLDEST_JAX)"
	@$(DEV_PY) -m pytest $(PARALLEL)

test-newest:
	@if .ci/find-python 3.12 >/dev/null 2>&1; then \
	  $(MAKE) --no-print-directory .venv-newest/.ready && echo "==> tests on the newest jax" && .venv-newest/bin/python -m pytest --quiet $(PARALLEL); \
	else echo "==> tests on the newest jax: left out, Python 3.12 must be on this machine, found none"; fi

gpu-test: $(USER_ENV)
	@$(USER_PY) -m pytest -m gpu

clean:
	rm -rf .venv .venv-dev .venv-newest .venv-wheel build dist jaxqla/lib .out
