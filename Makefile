# make demo     installs paxlite with its core dependencies and trains a small GPT on real text;
#               FLAGS=--fdl.MAX_STEPS=100 and the like are passed on
# make test     installs the test extra and runs the tests (four minutes on 2 cores)
# make test-slow the tests that take longer (eighteen minutes)
# make test-exhaustive more cases of the same, for a change of what they are about, and once a week;
#               SHARD=3/12 runs the third of twelve parts
# make docs     builds the pages in docs/ into build/site
# make check    ruff and mypy
# make fix      repairs what ruff can repair, and formats
# They find Python 3.12 or newer by themselves; PYTHON=python3.13 chooses another one.

PYTHON ?=
VENV ?= .venv
BIN := $(VENV)/bin
LOGS ?= logs/demo
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
# the scripts that tests start would run that Python instead of the environment's
unexport PYTHON

.PHONY: always demo test test-slow test-exhaustive docs site check fix clean

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
	$(PYTEST) -m exhaustive --durations=10 $(if $(SHARD),--shard=$(SHARD))

docs site: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q docs build/site

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A Python that is asked for on the command line is looked at even if the environment is up to date.
$(VENV)/.core: pyproject.toml $(if $(filter command%,$(origin PYTHON)),always)
	@sh scripts/make_environment.sh "$(VENV)" "$(PYTHON)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

# Compiling all modules of these packages takes minutes, and tests import a tenth of them.
$(VENV)/.dev: pyproject.toml $(VENV)/.core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/te transformer-engine==2.20.2
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
