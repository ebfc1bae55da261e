# One command per intent. Everything runs in .venv, which the first command makes.
PYTHON ?= python3
# The package index for torch. Left empty, pip's own; for the small build without CUDA:
# make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test bench chaos simulate base-install schemas docs lint format clean

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[all,dev]'
	touch $@

demo: setup
	$(BIN)/trinity-events demo

test: setup
	$(BIN)/pytest

bench: setup
	$(BIN)/python -m benchmarks

# make chaos ARGS="--only reducer/ --times 3"; --keep writes the matrix into the documentation.
chaos: setup
	$(BIN)/python -m tests.chaos $(ARGS)

# make simulate SEEDS=100000; without it, 5,000 seeds or one minute, and the planted bugs.
simulate: setup
	$(BIN)/python -m tests.simulation $(if $(SEEDS),--seeds $(SEEDS))

base-install: setup
	tests/install/base_install.sh

schemas: setup
	$(BIN)/python -m trinity_schemas.documents

docs: setup
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m trinity_schemas.documents --check

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
