# One command per intent. Everything runs in .venv, which the first command makes.
PYTHON ?= python3
# The package index for torch. Left empty, pip's own; for the small build without CUDA:
# make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
# The releases of veRL that the backend and the helpers are tried with, each in a .venv of its own.
VERL_VERSIONS ?= 0.9.1 0.8.0

.PHONY: setup demo test oldest-server bench chaos simulate verl base-install schemas docs lint format clean

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

# The oldest promised server, for make test to run a part of the tests on; from Debian's archive.
oldest-server:
	tests/install/oldest_server.sh

bench: setup
	$(BIN)/python -m benchmarks

# make chaos ARGS="--only reducer/ --times 3"; --keep writes the matrix into the documentation.
chaos: setup
	$(BIN)/python -m tests.chaos $(ARGS)

# make simulate SEEDS=100000; without it, 5,000 seeds or one minute, and the planted bugs.
simulate: setup
	$(BIN)/python -m tests.simulation $(if $(SEEDS),--seeds $(SEEDS))

# The tests that need veRL itself. make verl-0.9.1 is of one release.
verl: $(VERL_VERSIONS:%=verl-%)

verl-%: $(VENV)-verl-%/installed
	$(<D)/bin/pytest tests/verl

.PRECIOUS: $(VENV)-verl-%/installed
$(VENV)-verl-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(@D)/bin/pip install --quiet -c constraints.txt -e '.[all,dev,verl]'
	$(@D)/bin/pip install --quiet --no-deps verl==$*
	touch $@

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
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m trinity_schemas.documents --check
	$(BIN)/python -m tests.lint.prose

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VENV)-verl-* .oldest-server site .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
