# Every target sets up what it needs from nothing: a virtual environment in the checkout.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ENGINES ?= .venv-engines
ENGINES_STAMP := $(ENGINES)/.installed

.PHONY: help setup demo test test-engines quick check fix bench bench-engines clean

help:
	@echo "make demo   install, then run the whole idea on real numbers (about two minutes)"
	@echo "make test   install, then run every test"
	@echo "make test-engines  install vLLM, Megatron-core and Ray, then run the tests that need them"
	@echo "make quick  the tests that take seconds"
	@echo "make check  lint, format, types, layers"
	@echo "make fix    lint and format, in place"
	@echo "make bench  the benchmarks of tools/bench, as ratios"
	@echo "make bench-engines  what recording costs inside vLLM and Megatron-core"

setup: $(STAMP)

# torch comes first and alone: see requirements/cpu.txt.
# Azurite, the Azure server of tests/stores, comes from npm; where there is no npm those tests say so and are skipped.
$(STAMP): pyproject.toml requirements/cpu.txt requirements/stores.txt requirements/kernels.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements/cpu.txt
	$(BIN)/python -m pip install --quiet -e '.[replay,report,dev,bench]' -r requirements/stores.txt -r requirements/kernels.txt
	npm install --prefix $(VENV)/azurite --no-audit --no-fund --silent azurite@3.35.0 || echo "no npm: no Azure server"
	@touch $@

demo: $(STAMP)
	$(BIN)/rlk-ledger demo --dir demo $(if $(FAULT),--fault $(FAULT))

test: $(STAMP)
	$(BIN)/pytest $(ARGS)

# The engines pin torch, numpy and transformers themselves. Their image, sound and compiler companions do not match a
# CPU build of torch, and with torchvision present neither vllm nor transformers can be imported: they go last.
$(ENGINES_STAMP): pyproject.toml requirements/cpu.txt requirements/engines.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --upgrade pip
	$(ENGINES)/bin/python -m pip install --quiet -r requirements/cpu.txt -r requirements/engines.txt
	$(ENGINES)/bin/python -m pip install --quiet -e '.[replay,report]' 'pytest>=8.3' 'pytest-timeout>=2.3' 'hypothesis>=6.115'
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

# The engines bring an older transformers than the other tests run with: what records it is tested with both.
test-engines: $(ENGINES_STAMP)
	$(ENGINES)/bin/python -m pytest tests/engines tests/integrations/test_transformers_recording.py

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

ENGINE_BENCH := tools/bench/p3_engine_cost.py

bench: $(STAMP)
	@for script in $(filter-out $(ENGINE_BENCH),$(wildcard tools/bench/p*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

bench-engines: $(ENGINES_STAMP)
	$(ENGINES)/bin/python $(ENGINE_BENCH)

clean:
	rm -rf $(VENV) $(ENGINES) demo out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
