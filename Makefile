PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart tasks-demo test test-slow check format clean

quickstart: $(VENV)/ready
	$(BIN)/offbook quickstart

tasks-demo: $(VENV)/ready
	$(BIN)/python bench/cpu/tasks.py --out runs/tasks-demo --json docs/results/tasks.json --report docs/results/tasks.md

test: $(VENV)/ready
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/ready
	$(BIN)/python -m pytest -m slow

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch is pinned before everything else: an unpinned one brings gigabytes of CUDA packages to a CPU machine.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV)
