# The commands do all the set-up: Python 3.11 and make are enough.
#
#   make demo    the environment, then the main job: a hyperbolic transformer trained, compared, certified, drawn; three claims tested
#   make quick   the environment, then lint, types and one draw of every law, but that of torch.compile, for every class
#   make test    the environment, then lint, types, documentation and the whole suite
#   make fuzz    the environment, then a million random calls of every public class and function (about 10 minutes)
#   make mutation  a thousand small errors put into the library, one at a time: do the tests notice? (hours)
#   make bench   the environment, then every benchmark with its target; ONLY="cdist simplicial" some of them

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTEST_ARGS ?=
ONLY ?=
BENCH_ARGS ?=
FUZZ_ARGS ?= --out benchmarks/results/fuzz.json

BIN := .venv/bin
EXTRAS := examples,jets,molecules,pyg,report,triton
STAMP := .venv/.installed
SOURCES := $(wildcard holonomy tests examples experiments benchmarks docs) conftest.py hatch_build.py

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export MPLBACKEND := Agg
# Tests start dozens of processes, each of which would compile the library and its tests anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo quick test fuzz mutation bench check docs suite clean
.NOTPARALLEL:

help:
	@sed -n '3,8s/^# *//p' Makefile

# Made once, and again only when what is to be installed changed. The build backend is installed from
# the same constraints as everything else, hence no build isolation. The pip that comes with Python 3.11 knows no
# dependency groups, so the environment gets a newer one first.
$(STAMP): pyproject.toml constraints.txt
	@echo "environment: .venv from $(PYTHON) (a few minutes the first time)"
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@"$(PYTHON)" -m venv .venv
	@$(BIN)/python -m pip install -qq -c constraints.txt pip
	@$(BIN)/python -m pip install -qq -c constraints.txt --group build
	@$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation --group dev -e '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m experiments.acquired_traits --seeds 1 --overwrite --out runs/demo/compared
	@OMP_NUM_THREADS=1 $(BIN)/python -m examples.demo
	@OMP_NUM_THREADS=1 $(BIN)/python -m examples.tree --out runs/demo/map
	@OMP_NUM_THREADS=1 $(BIN)/python -m holonomy.theory --claims distances.closure hyperbolic.midpoint distances.naive

test: check docs suite

quick: check
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet --numprocesses auto --hypothesis-profile=quick --one-case -m "not slow" tests/laws $(PYTEST_ARGS)

# The order is from the quickest to the slowest, and the suite's closing line comes last.
check: $(STAMP)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/pydoclint --quiet holonomy
	@$(BIN)/pyright

docs: $(STAMP)
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs docs/_build/html
	@$(BIN)/python docs/check_pages.py docs/_build/html

suite: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet --numprocesses auto $(PYTEST_ARGS)

fuzz: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FUZZ_ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.experiments.interruptions

# The map is drawn anew; a run that was stopped goes on with `python -m tests.mutation run`.
mutation: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutation map
	@rm -f runs/mutation/outcomes.jsonl
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutation run --write

bench: $(STAMP)
	@$(BIN)/python -m benchmarks $(ONLY) $(BENCH_ARGS)

clean:
	@rm -rf .venv docs/_build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
