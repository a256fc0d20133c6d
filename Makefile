# `make run` trains an example on this machine; `make test` runs everything that CI runs.
# Both set up .venv first and need only Python 3.11+ and make. Nothing is installed outside .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Tests start hundreds of interpreters, which would compile the whole package each.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
RANKS ?= 2
OUT ?= runs/digits-$(shell date +%Y%m%d-%H%M%S)-$(shell echo $$$$)
PYTEST_ARGS ?=
# Of pytest; CI has two processors, and an eighth of the tests' time is spent waiting for processes.
WORKERS ?= 3

.PHONY: help run test setup format bench coverage docs gallery clean

help:
	@echo "make run     set up .venv, train examples/digits_mlp.py on $(RANKS) processes, report it (RANKS=, OUT=)"
	@echo "make test    set up .venv, then format, lint, types, import order, tests (PYTEST_ARGS=)"
	@echo "make format  format and fix what ruff can fix"
	@echo "make bench   side-by-side measurements against other systems"
	@echo "make docs    the documentation as pages in site/"
	@echo "make gallery the lectures, reproduced: run all exhibits, write their pages, build the documentation"
	@echo "make coverage  40 architectures of transformers, drawn by a seed, under five plans against their own eager loop"
	@echo "make clean   remove .venv and caches (runs/ is kept)"

run: $(VENV)/.run-ready
	@out="$(OUT)"; \
	echo "== plait run examples/digits_mlp.py --plan ddp --ranks $(RANKS) --out $$out"; \
	$(BIN)/plait run examples/digits_mlp.py --plan ddp --ranks $(RANKS) --out "$$out"; \
	echo "== plait report $$out"; \
	$(BIN)/plait report "$$out"

test: setup
	@echo "== ruff format --check" && $(BIN)/ruff format --check
	@echo "== ruff check" && $(BIN)/ruff check
	@echo "== mypy" && $(BIN)/mypy
	@echo "== lint-imports" && $(BIN)/lint-imports
	@echo "== pytest" && $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

setup: $(VENV)/.dev-ready

format: setup
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format

bench: $(VENV)/.bench-ready
	$(BIN)/python -m bench.data_parallel

docs: setup
	@$(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

gallery: setup
	$(BIN)/python -m examples.lectures
	@$(BIN)/mkdocs build --quiet --strict
	@echo "site/gallery/index.html"

coverage: setup
	$(BIN)/python -m bench.coverage transformers --sample 40 --jobs 2 --strict --cache runs/coverage-sample.jsonl

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples bench -name __pycache__ -type d -prune -exec rm -rf {} +

# The first python3 on the path that is 3.11 or newer and can make virtual environments.
$(VENV)/bin/python:
	@for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "== set-up: making $(VENV) with $$($$python --version)"; \
	    rm -rf $(VENV); $$python -m venv $(VENV); exit 0; \
	  fi; \
	done; \
	echo "No Python 3.11 or newer with venv on the path. Fix: install Python 3.11+ (on Debian, with python3-venv)." >&2; \
	exit 1

# One stamp per set of requirements; a changed pyproject.toml or constraints.txt installs again.
$(VENV)/.run-ready: EXTRAS := examples
$(VENV)/.dev-ready: EXTRAS := dev
$(VENV)/.bench-ready: EXTRAS := bench
$(VENV)/.%-ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "== set-up: installing plait[$(EXTRAS)] into $(VENV) (minutes the first time)"
	@$(PIP) -e '.[$(EXTRAS)]'
	@touch $@
	@echo "== set-up: done"
