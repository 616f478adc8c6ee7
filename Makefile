# Every target sets up what it needs from nothing: a virtual environment in the checkout.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test quick check fix bench clean

help:
	@echo "make demo   install, then run the whole idea on real numbers (about two minutes)"
	@echo "make test   install, then run every test"
	@echo "make quick  the tests that take seconds"
	@echo "make check  lint, format, types, layers"
	@echo "make fix    lint and format, in place"
	@echo "make bench  the benchmarks of tools/bench, as ratios"

setup: $(STAMP)

# torch comes first and alone: see requirements/cpu.txt.
$(STAMP): pyproject.toml requirements/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements/cpu.txt
	$(BIN)/python -m pip install --quiet -e '.[replay,report,dev,bench]'
	@touch $@

demo: $(STAMP)
	$(BIN)/rlk-ledger demo --dir demo $(if $(FAULT),--fault $(FAULT))

test: $(STAMP)
	$(BIN)/pytest

quick: $(STAMP)
	$(BIN)/pytest -m "not slow and not demo"

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	@for script in tools/bench/p*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) demo out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
