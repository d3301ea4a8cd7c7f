# Two commands do everything on a fresh machine with Python 3.11 or later and make: `make demo`, `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: test check demo format clean

test: check
	$(BIN)/python -m pytest

check: .venv/ready
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: .venv/ready
	$(BIN)/python examples/demo.py

format: .venv/ready
	$(BIN)/ruff check --fix src tests benchmarks examples
	$(BIN)/ruff format src tests benchmarks examples

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf .venv
