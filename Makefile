# Two commands do everything on a fresh machine: `make tour` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Threads that wait should sleep: spinning ones starve each other where cores are few or shared.
export OMP_WAIT_POLICY := PASSIVE
STAMP := $(VENV)/.installed
UV_VERSION := 0.9.0

.PHONY: help setup tour test check pytest notebooks pages lab voice gpu-test lock clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv with the locked dependencies (done once; redone when the lock changes)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v in ((3, 11), (3, 12)) else f"Python 3.11 or 3.12 is needed, {sys.executable} is {v[0]}.{v[1]}. Try: make PYTHON=python3.12 …")'
	@echo "Installing into $(VENV): about 5 GB, most of it torch; some minutes the first time."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'uv>=$(UV_VERSION)'
	$(BIN)/uv pip install --quiet --python $(BIN)/python --requirement requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	touch $@

tour: setup ## run notebooks 01 and 02 on the bundled data and write build/tour.html
	$(BIN)/vgraph-lab tour

test: check pytest notebooks ## everything: lint, types, tests, notebooks (about 8 minutes on two cores)

check: setup ## lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

pytest: setup ## the tests (two at a time; tests/gpu skips itself without a GPU)
	$(BIN)/python -m pytest -n 2 --dist loadfile

notebooks: setup ## every notebook, verdict lines compared
	$(BIN)/python -m pytest --nbval-lax --nbval-cell-timeout=600 -p no:xdist -W default notebooks

pages: setup ## run every notebook into a static page, build/pages/*.html
	$(BIN)/jupyter nbconvert --to html --execute --output-dir build/pages \
	  --NbConvertBase.display_data_priority="['text/html', 'image/svg+xml', 'image/png', 'text/markdown', 'text/plain']" notebooks/*.ipynb

lab: setup ## open JupyterLab on the notebooks (LAB_ARGS="--no-browser --ip=0.0.0.0" on a remote machine)
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS) notebooks

voice: setup ## install the recogniser and re-measure how well the bundled checkpoint speaks
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[voice]'
	$(BIN)/vgraph-lab voice --wer

gpu-test: setup ## the tests that need a CUDA device; a missing one is a failure
	VGL_REQUIRE_CUDA=1 $(BIN)/python -m pytest -m cuda tests/gpu

lock: $(STAMP) ## resolve the dependencies anew into requirements.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra test --no-header --no-annotate --no-emit-index-url \
	  --no-emit-find-links --output-file requirements.lock pyproject.toml

clean: ## remove reports and caches, keep .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
