# Everything that can be typed here says what it does. PYTHON picks the interpreter for .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet
.DEFAULT_GOAL := help
.PHONY: help demo test test-all check selfcheck docs house clean

help:  ## say what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

demo: $(VENV)/.installed  ## set up, then train on real digits and compare guides (minutes)
	@echo "== reproducing shape-codes/digits: trains, evaluates, writes figures"
	$(BIN)/capsule-zoo reproduce shape-codes/digits --out runs/demo
	@echo "== the figures are in runs/demo/shape-codes; results/ is as it was"

test: $(VENV)/.installed-test  ## set up, then run the quick tests (four minutes)
	@echo "== running the tests"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-all: $(VENV)/.installed-test  ## set up, then run the quick and the long tests
	@echo "== running the tests, long ones too"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow"

check: $(VENV)/.installed-dev  ## lint, formatting, types, and a wheel that holds every module
	@echo "== ruff: lint"
	$(BIN)/ruff check .
	@echo "== ruff: formatting"
	$(BIN)/ruff format --check .
	@echo "== mypy: types"
	$(BIN)/mypy -p capsule_zoo
	@echo "== the wheel: every module in it, every module imports"
	$(BIN)/python -m pytest -q -m "not slow" tests/test_packaging.py

selfcheck: $(VENV)/.installed-test  ## posteriors, samplers and gradients against exact values, and faults on purpose (minutes)
	@echo "== the self-check"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -m "slow or not slow" tests/selfcheck

docs: $(VENV)/.installed-docs  ## the documentation site, from docstrings and records, into build/docs
	@echo "== building the site; a warning is an error"
	$(BIN)/sphinx-build -W --keep-going --quiet docs build/docs
	@echo "== read it: build/docs/index.html"

house: $(VENV)/.installed  ## print the size of the source, and which imports break the order
	$(BIN)/python tests/house.py

clean:  ## remove .venv and everything that was built
	@echo "== removing .venv, build output and caches"
	rm -rf $(VENV) build docs/notebooks docs/others docs/diagrams dist *.egg-info .coverage htmlcov
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each set of extras: nothing is installed again until setup.cfg changes.
$(VENV)/.installed: EXTRAS :=
$(VENV)/.installed-test: EXTRAS := [test]
$(VENV)/.installed-dev: EXTRAS := [test,dev]
$(VENV)/.installed-docs: EXTRAS := [docs]
$(VENV)/.installed $(VENV)/.installed-test $(VENV)/.installed-dev $(VENV)/.installed-docs: setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Capsule Zoo needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || { echo "== creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing capsule-zoo$(EXTRAS) into $(VENV) (PyTorch is large: the first time takes minutes)"
	@$(INSTALL) "setuptools>=68" wheel
	@$(INSTALL) --no-build-isolation --editable ".$(EXTRAS)"
	@touch $@
