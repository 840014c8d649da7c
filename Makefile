# `make setup` makes .venv and .models and skips what is already right; the other targets call it.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

# No model hub is ever asked, and vLLM on the CPU takes 1 GiB for its cache.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export VLLM_CPU_KVCACHE_SPACE := 1
# Importing Airflow writes a configuration where there is none: not into the home of whoever runs the tests.
export AIRFLOW_HOME := $(CURDIR)/.build/airflow

# A stage says its name first; the one that fails is named last, and nothing after it runs.
define stage
@echo "== $(1)"; $(2) || { status=$$?; echo "== FAILED: $(1), exit status $$status"; exit 1; }
endef

.NOTPARALLEL:
.PHONY: help setup demo test test-long lint test-unit test-engine test-airflow bench format freeze clean

help:
	@echo "make setup    make the environment (.venv) and the small models (.models)"
	@echo "make demo     a real Airflow takes a batch file from S3 through real vLLM on this machine's CPU"
	@echo "make test     every check and every test: lint, test-unit, test-engine, test-airflow"
	@echo "make test-long  the soak: thousands of rows, random faults, sudden deaths"
	@echo "make lint     format, style, types and import boundaries"
	@echo "make bench    the measured comparisons in benchmarks/"
	@echo "make format   bring the code into the project's format"
	@echo "make clean    remove all that the other targets made"

setup:
	@$(PYTHON) scripts/setup_env.py

demo: setup
	@$(BIN)/python -m scripts.demo

test: lint test-unit test-engine test-airflow
	@echo "== every stage passed"

lint: setup
	$(call stage,ruff format --check,$(BIN)/ruff format --check .)
	$(call stage,ruff check,$(BIN)/ruff check .)
	$(call stage,mypy --strict,$(BIN)/mypy)
	$(call stage,lint-imports,$(BIN)/lint-imports)

test-unit: setup
	$(call stage,tests without an engine and without Airflow's services,$(PYTEST) -m "not engine and not airflow_stack and not long")

test-engine: setup
	$(call stage,tests on real vLLM,$(PYTEST) -m "engine and not airflow_stack and not long")

test-airflow: setup
	$(call stage,tests on a real Airflow,$(PYTEST) -m "airflow_stack and not long")

test-long: setup
	$(call stage,tests that take minutes,$(PYTEST) -m long)

bench: setup
	@set -e; for name in validate pipeline engine; do echo "== $$name"; $(BIN)/python benchmarks/$$name.py; done

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

freeze: setup
	@$(PYTHON) scripts/setup_env.py --freeze

clean:
	rm -rf .venv .models .demo .build dist build *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
