# make train      train a staged ResNet on CIFAR-10, about three minutes
# make test       run the tests
# make lint       check style, types, imports and measures of the source
# make test-slow  run the tests that take longer
# make test-gpu   run the tests and timings that need a GPU: one CUDA device, at most eight minutes
# make bench      time the emulator against plain training, and processes against PyTorch's own pipeline
# All set up what they need in .venv. PYTHON=... chooses the interpreter it is made with.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What installs together: Python 3.8 (the IPUs' floor) with torch 2.0.1, 3.9 with 2.8, 3.10 to 3.13 with 2.13.
CONSTRAINTS := $(shell $(PYTHON) -c 'import sys; print("constraints/%s.txt" % {(3, 8): "py38-torch2.0.1", (3, 9): "py39-torch2.8", (3, 10): "py310-torch2.13"}.get(sys.version_info[:2], "py311-torch2.13"))')
PIP := $(BIN)/python -m pip --disable-pip-version-check --retries 5 --timeout 60

# Containers often forbid Python's bytecode: then every process compiles the package again, and pytest every test.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install train test test-slow test-all test-gpu test-ipu-floor lint hostile simulate kills oracle wheel site browser chromium bench equality sweep documented reproduce reproduce-full clean

help:
	@sed -n '/^# make /s/^# //p' Makefile
	@echo
	@echo "more: install test-all test-ipu-floor hostile simulate kills oracle wheel site browser equality sweep documented reproduce reproduce-full clean"

install: $(VENV)/.installed

# The stamp is written last, so that an interrupted installation starts again.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) tools/check_torchvision.py
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) has no venv module: install python3-venv (Debian) or another Python" >&2; exit 2; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	@$(BIN)/python tools/check_torchvision.py
	@touch $@

train: install
	$(BIN)/python tools/fetch_data.py cifar10
	$(BIN)/python tools/train.py configs/resnet20_cifar10.yaml --out runs/resnet20_cifar10 --overwrite \
	    --against gpipe --accumulate 4,16

# Two tests run at a time. JOBS=1 runs one after another.
JOBS ?= 2

# `test` leaves out the tests marked slow (CONTRIBUTING.md). `test-slow` runs these alone, except those that are also marked nightly.
# `test-all` runs all tests.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test: install
	$(PYTEST)

test-slow: install
	$(PYTEST) -m 'slow and not nightly and not browser' --durations 20

test-all: install
	$(PYTEST) -m 'not browser'

# Run the tests marked gpu, and time the emulator on the GPU. No GPU was at hand when this was written: not run on hardware.
test-gpu: install
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("error: test-gpu needs a CUDA device, and a PyTorch that is built for it")'
	timeout 480 $(BIN)/python -m pytest -m gpu
	$(BIN)/python -m ipu_pipe check

# Test the IPU backend against the double of PopTorch on the Python and torch of PopTorch 3.4. FLOOR chooses the interpreter.
FLOOR ?= $(firstword $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.8.*/bin/python) python3.8)
IS_FLOOR := -c 'import sys; sys.exit(sys.version_info[:2] != (3, 8))'
FLOOR_VENV := .venv-ipu-floor
IPU_TESTS := tests/test_ipu_options.py tests/test_poptorch_backend.py tests/test_poptorch_starts.py tests/test_poptorch_double.py \
    tests/test_poptorch_loop.py tests/test_check.py tests/test_sdk.py

test-ipu-floor: $(FLOOR_VENV)/.installed
	$(FLOOR_VENV)/bin/python -m pytest -m 'not browser' $(IPU_TESTS)

$(FLOOR_VENV)/.installed: pyproject.toml constraints/py38-torch2.0.1.txt
	@$(FLOOR) $(IS_FLOOR) || { echo "error: FLOOR=$(FLOOR) is not Python 3.8" >&2; exit 2; }
	$(FLOOR) -m venv --clear $(FLOOR_VENV)
	$(FLOOR_VENV)/bin/python -m pip --disable-pip-version-check --retries 5 --timeout 60 install --quiet \
	    --constraint constraints/py38-torch2.0.1.txt --editable '.[dev]'
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m '' tests/test_house.py
	$(BIN)/python -m tests.house

# Run 2,000 seeded hostile inputs: no traceback, no hang, no damaged state accepted.
CASES ?= 2000
SEED ?= 0

hostile: install
	$(BIN)/python tools/hostile.py --cases $(CASES) --seed $(SEED)

# Train on simulated ranks, whose messages come in an order that a seed decides. A seed that fails runs alone with SEEDS=1 START=it.
SEEDS ?= 10000
START ?= 0

simulate: install
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --start $(START) --jobs $(JOBS)

# Kill a rank of runs on processes again and again, as torchrun restarts them: the numbers must be those of a run never killed.
# BACKEND=xla kills runs on XLA devices.
KILLS ?= 200
BACKEND ?= distributed

kills: install
	$(BIN)/python -m tests.kills --kills $(KILLS) --seed $(SEED) --backend $(BACKEND)

# Compare the analysis of profilers' traces with HolisticTraceAnalysis, which needs an environment of its own.
# HTA_FILES=FOLDER of its public files (its tests/data) compares these, too.
ORACLE_VENV := .venv-oracle

oracle: $(ORACLE_VENV)/.installed
	HTA_PYTHON=$(ORACLE_VENV)/bin/python $(BIN)/python -m pytest -m slow tests/test_trace_oracle.py

$(ORACLE_VENV)/.installed: install
	$(PYTHON) -m venv --clear $(ORACLE_VENV)
	$(ORACLE_VENV)/bin/python -m pip --disable-pip-version-check --retries 5 --timeout 60 install --quiet 'HolisticTraceAnalysis>=0.5'
	@touch $@

# Time the emulator against plain training, and processes against PyTorch's own pipeline.
bench: install
	$(BIN)/python tools/bench.py
	$(BIN)/python tools/bench_pipeline.py

# Run all rows of the tables of which the tests have every pair, and compare processes with the emulator bit for bit, every
# method on five models. Takes half an hour.
equality: install
	TESTS_FULL=1 $(PYTEST) -m 'not browser' tests/test_processes_equal_emulator.py tests/test_emulator_exact.py tests/test_rules.py tests/test_simulation.py
	$(BIN)/python tools/fetch_data.py shakespeare
	$(BIN)/python tools/fetch_data.py translation
	$(BIN)/python tools/equality.py

# Train small models of torchvision, timm and transformers by five methods: processes, emulator and a plain loop. Takes an hour.
sweep: install
	$(BIN)/python tools/sweep.py --out docs/results/third_party

# Run the documented commands that train to the end, each for at most LIMIT minutes, and write docs/results/documented.md.
LIMIT ?= 15

documented: install
	$(BIN)/python tools/fetch_data.py cifar10
	$(BIN)/python tools/documented.py --limit $(LIMIT)

# Run the papers' experiments, of those that train the short ones: 50 minutes on two cores, measured.
# reproduce-full: all of them, by estimate 26 core-hours. Finished runs are kept.
SMALL := 0.25

reproduce: install
	$(BIN)/python tools/fetch_data.py cifar10
	$(BIN)/python tools/fetch_data.py shakespeare
	$(BIN)/python tools/fetch_data.py translation
	$(BIN)/python tools/reproduce.py all --at-most $(SMALL) --out docs/results

reproduce-full: SMALL := 1000000
reproduce-full: reproduce

# Build the source package, from it the wheel (on Python 3.8, too), and run its commands in a separate environment, outside the clone.
WHEEL_VENV := .venv-wheel

wheel: install
	rm -rf $(WHEEL_VENV)
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check --retries 5 --timeout 60 install --quiet --upgrade setuptools
	$(WHEEL_VENV)/bin/python -c 'from setuptools import build_meta; build_meta.build_sdist("$(WHEEL_VENV)/dist")' >/dev/null
	$(PIP) wheel --quiet --no-deps --wheel-dir $(WHEEL_VENV)/dist $(WHEEL_VENV)/dist/*.tar.gz
	@if $(FLOOR) $(IS_FLOOR) 2>/dev/null; \
	then $(FLOOR) -m pip wheel --quiet --no-deps --wheel-dir $(WHEEL_VENV)/floor $(WHEEL_VENV)/dist/*.tar.gz && echo "passed: the wheel on Python 3.8"; \
	else echo "skipped: the wheel on Python 3.8: FLOOR=$(FLOOR) is not Python 3.8"; fi
	env -u PYTHONPATH $(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check --retries 5 --timeout 60 install --quiet \
	    --constraint $(CONSTRAINTS) $(WHEEL_VENV)/dist/*.whl
	$(WHEEL_VENV)/bin/python tests/wheel_commands.py

# Build the documentation as a site in build/site. (--quiet would drop the warnings that --strict counts.)
site: $(VENV)/.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml
	@echo "written: build/site/index.html"

$(VENV)/.site: $(VENV)/.installed
	$(PIP) install --quiet --constraint $(CONSTRAINTS) --editable '.[site]'
	@touch $@

# Test the HTML page of `analyze`, and the site's search, in headless Chromium.
browser: $(VENV)/.browser $(VENV)/.site
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || $(MAKE) --no-print-directory chromium
	$(BIN)/python -m pytest -m browser tests/browser

$(VENV)/.browser: $(VENV)/.installed
	$(PIP) install --quiet --constraint $(CONSTRAINTS) 'selenium>=4'
	@touch $@

SUDO := $(shell test "$$(id -u)" = 0 || echo sudo -n)

chromium:
	@command -v apt-get >/dev/null && $(SUDO) true 2>/dev/null || { echo "error: the browser's test needs Chromium and its driver: as root, apt-get install chromium chromium-driver" >&2; exit 2; }
	$(SUDO) apt-get -qq update
	$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium chromium-driver >/dev/null

clean:
	rm -rf $(VENV) $(FLOOR_VENV) $(WHEEL_VENV) build *.egg-info .mypy_cache .ruff_cache .hypothesis
