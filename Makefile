# make demo     installs paxlite with its core dependencies and trains a small GPT on real text;
#               FLAGS=--fdl.MAX_STEPS=100 and the like are passed on
# make test     installs the test extra and runs the tests (three to five minutes on 2 cores)
# make test-slow the tests that take longer (about half an hour)
# make test-exhaustive more cases of the same, for a change of what they are about, and once a week
# make docs     builds the pages in docs/ into build/site
# make check    ruff and mypy
# make fix      repairs what ruff can repair, and formats
# PYTHON=python3.11 chooses another Python than the first that is there of 3.12, 3.13 and python3

PYTHON ?= $(shell for p in python3.12 python3.13; do if $$p -c 'import venv' 2>/dev/null; then break; fi; p=python3; done; echo $$p)
VENV ?= .venv
BIN := $(VENV)/bin
LOGS ?= logs/demo
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
# the scripts that tests start would run that Python instead of the environment's
unexport PYTHON

.PHONY: demo test test-slow test-exhaustive docs site check fix clean

demo: $(VENV)/.core
	$(BIN)/python -m paxlite.main --fdl_config=DemoGPT --job_log_dir=$(LOGS) $(FLAGS)

# All tests of a file run in one worker: what they share is made once, and there is one Slurm. There
# is one worker more than cores, as many tests wait for other processes.
PYTEST = $(BIN)/python -m pytest -n $$(($(WORKERS) + 1)) --dist=loadfile --no-loadscope-reorder

test: $(VENV)/.dev
	$(PYTEST) --durations=25

test-slow: $(VENV)/.dev
	$(PYTEST) -m 'slow and not exhaustive' --durations=10

test-exhaustive: $(VENV)/.dev
	$(PYTEST) -m exhaustive --durations=10

docs site: $(VENV)/.dev
	$(BIN)/python -m sphinx -W --keep-going -q docs build/site

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.core: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("paxlite needs Python 3.11 or newer; choose one with make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/te transformer-engine==2.20.2
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
