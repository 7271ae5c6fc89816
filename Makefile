# From a fresh clone: `make train` or `make test`. See CONTRIBUTING.md for the rest.
#   PYTHON=python3.12      the interpreter that .venv is made from
#   TORCH_INDEX=URL        the package index torch alone is taken from, for a CPU-only or another CUDA build
#   TEST_ARGS="-k reader"  passed on to pytest
#   PART=kill              one part of `make soak`
#   SUITES=honest          one suite of `make quality`

PYTHON ?= python3
TORCH_INDEX ?=
TEST_ARGS ?=
PART ?=
SUITES ?= sample honest dhen models
SYNTH_ARGS := --rows 1800000 --files 9 --scale 0.01

BIN := .venv/bin
CORE := $(wildcard src/meseta/*.cpp src/meseta/*/*.h src/meseta/*/*/*.cpp src/meseta/*/*/*.h)
# tests/conftest.py says how many processes of tests there are; each may have 14 ranks beside it.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: train test soak quality sanitize lint type docs site wheel bench clean
.DELETE_ON_ERROR:

# The main job: raw log -> Parquet -> trained model. A finished run is shown again, an interrupted one goes on.
train: .venv/installed data/main/done
	$(BIN)/meseta train examples/configs/main.yaml

data/main-raw/done: | .venv/installed
	rm -rf $(@D)
	$(BIN)/meseta data synth --out $(@D) $(SYNTH_ARGS)
	@touch $@

# New data make the old run meaningless, so it goes with them.
data/main/done: data/main-raw/done
	rm -rf $(@D) runs/main
	$(BIN)/meseta prepare '$(<D)/*.tsv' --out $(@D) --test-files $(<D)/day_8.tsv
	@touch $@

# Hundreds of processes start; without bytecode each would compile the package anew.
test: export PYTHONDONTWRITEBYTECODE :=
test: .venv/installed
	$(PYTEST) $(TEST_ARGS)

# The whole matrices, kills and fuzz: PART=kill is one part, `make soak PART=--list` tells them; see docs/soak.md.
soak: .venv/installed
	$(BIN)/python tools/soak/soak_parts.py $(PART)

# Which model learns more: examples/quality, in hours; SUITES=honest is one of them. What is done is kept in runs/quality.
quality: export OMP_WAIT_POLICY := passive
quality: .venv/installed
	@for suite in $(SUITES); do \
	  $(BIN)/python tools/quality examples/quality/$$suite.yaml --out runs/quality/$$suite || exit 1; \
	done

# The core under AddressSanitizer and UndefinedBehaviorSanitizer; MESETA_ISA=baseline takes one instruction set of three.
sanitize: .venv/installed
	PYTHON=$(BIN)/python tools/sanitize.sh $(TEST_ARGS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

type: .venv/installed
	$(BIN)/mypy

# The pages' code runs, then the site is built.
docs: .venv/installed
	$(PYTEST) -m 'not soak' tests/docs tests/examples $(TEST_ARGS)
	$(MAKE) site

# Open site/index.html.
site: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# dist/ gets the sdist and, made from it, a wheel that installs without a compiler. No torch is needed to make them.
wheel:
	@PYTHON="$(PYTHON)" tools/check_machine.sh
	tools/make_wheel.sh "$(PYTHON)"

# PEER_PYTHON=/path/to/python names the interpreter that has FBGEMM and TorchRec.
bench: .venv/installed
	@for file in $(filter-out %/bench_ops.py %/bench_e2e.py,$(wildcard benchmarks/bench_*.py)); do \
	  $(BIN)/python "$$file" || exit 1; \
	done
	$(BIN)/python benchmarks/bench_ops.py --out benchmarks/results.csv
	$(BIN)/python benchmarks/bench_e2e.py --out benchmarks/results.csv

# Other data and runs are the user's own and stay.
clean:
	rm -rf .venv build dist site data/main-raw data/main runs/main .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# torch comes first and alone: nothing else may choose its version or its index.
.venv/torch: constraints.txt
	@PYTHON="$(PYTHON)" tools/check_machine.sh
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(PIP) --quiet pip
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

# The core is built with the pinned tools in .venv, so that its build folder can be reused from change to change.
.venv/installed: .venv/torch pyproject.toml CMakeLists.txt $(CORE)
	@PYTHON="$(PYTHON)" tools/check_machine.sh
	$(PIP) --quiet scikit-build-core hatch-fancy-pypi-readme nanobind cmake ninja
	$(PIP) --quiet --no-build-isolation -e '.[test,bench,dev,docs]'
	@touch $@
