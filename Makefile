# Everything runs from .venv, which is made from requirements.lock on first use.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The newest of these that starts (a version manager's shim may exist and not run).
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
  && { echo $$p; break; }; done)

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.set-up
# Test files that run at once.
WORKERS ?= 2
# Pass pytest arguments as in `make test TESTS="tests/algorithm -x"`.
TESTS ?=

.PHONY: help setup demo demo-code test lint format lock clean sandbox bench soak parity

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */|/' \
	  | awk -F'|' '{ printf "  make %-10s %s\n", $$1, $$2 }'
	@echo "Variables: PYTHON (3.11 or newer), WORKDIR (of a demo), TESTS (pytest arguments)."

setup: $(STAMP)  ## make .venv from the pinned versions

# The stamp is written last, so a set-up that was interrupted is done again.
$(STAMP): pyproject.toml requirements.lock
	@if [ -z "$(PYTHON)" ]; then \
	  echo "fadejax needs Python 3.11 or newer, and none of python3.13, python3.12, python3.11"; \
	  echo "and python3 is. Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python"; \
	  exit 1; fi
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
	  f"fadejax needs Python 3.11 or newer; PYTHON=$(PYTHON) is {v[0]}.{v[1]}")'
	@rm -f $(STAMP)
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  echo "Making $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv --clear $(VENV); fi
	@echo "Installing requirements.lock into $(VENV)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

demo: WORKDIR ?= runs/smollm2_arithmetic_demo
demo: $(STAMP)  ## train SmolLM2-135M on arithmetic with FADE (minutes, on a CPU)
	$(PY) -m fadejax.convert
	$(PY) -m fadejax.train --config=configs/smollm2_arithmetic_demo.py --workdir=$(WORKDIR)
	@echo "Report: $(abspath $(WORKDIR))/report.html"

demo-code: WORKDIR ?= runs/smollm2_code_demo
demo-code: $(STAMP)  ## train SmolLM2-135M on small Python functions, graded by asserts (under an hour)
	@$(PY) -m fadejax.verify.sandbox
	$(PY) -m fadejax.convert
	$(PY) -m fadejax.train --config=configs/smollm2_code_demo.py --workdir=$(WORKDIR)
	@echo "Report: $(abspath $(WORKDIR))/report.html"

bench: $(STAMP)  ## speed and memory, each beside a peer or a ceiling
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(PY) $$file; done

soak: $(STAMP)  ## 2000 items, honest and hostile, through one pool of graders (minutes)
	$(PY) benchmarks/soak.py

sandbox: $(STAMP)  ## install bubblewrap, which code tasks need, and check that it works here
	@command -v bwrap >/dev/null || { \
	  if [ "$$(id -u)" = 0 ]; then sudo=; else sudo=sudo; fi; \
	  if command -v apt-get >/dev/null; then \
	    $$sudo apt-get install -y bubblewrap || { $$sudo apt-get update && $$sudo apt-get install -y bubblewrap; }; \
	  elif command -v dnf >/dev/null; then $$sudo dnf install -y bubblewrap; \
	  else echo "Install bubblewrap with this system's package manager"; exit 1; fi; }
	@$(PY) -m fadejax.verify.sandbox

test: lint  ## lint, then the whole test suite
	$(PY) -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

# An environment of its own: torch is heavy. Where pip finds several builds of it, the CPU's will do.
PARITY := .venv-parity
parity: $(PARITY)/.set-up  ## compare with transformers, both ways (installs torch)
	$(PARITY)/bin/python -m pytest tests/parity/live.py -s $(TESTS)

$(PARITY)/.set-up: pyproject.toml requirements.lock | $(STAMP)
	@rm -f $@
	@$(PY) -m venv --clear $(PARITY)
	@echo "Installing requirements.lock and the extra parity into $(PARITY)"
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -r requirements.lock -e '.[parity]'
	@touch $@

lint: $(STAMP)  ## ruff (rules and format) and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)  ## rewrite the code as ruff likes it
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Solved for the oldest Python, so that every supported one runs the same versions. No hosts, paths
# or platform markers get in. `make lock UPGRADE=` keeps the versions that still fit.
UPGRADE ?= --upgrade
lock:  ## refresh requirements.lock from pyproject.toml
	@"$(PYTHON)" -m venv .lock-venv
	@.lock-venv/bin/python -m pip install --quiet --disable-pip-version-check uv
	.lock-venv/bin/uv pip compile --quiet $(UPGRADE) --extra test --python-version 3.11 \
	  --python-platform linux --no-emit-index-url --no-emit-find-links --no-annotate \
	  --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml

clean:  ## remove the environments and the caches (not runs/)
	rm -rf $(VENV) $(PARITY) .lock-venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
