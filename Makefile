# `make demo` and `make test` first set up what they need, the first time. `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

CONSTRAINTS := requirements/constraints.txt
# What `make setup` installs follows from these alone; it is done again only when one changes.
SOURCES_OF_SETUP := setup.cfg pyproject.toml $(CONSTRAINTS)
FOR_DEMO := $(VENV)/.hvd-adaptive-demo
INSTALLED := $(VENV)/.hvd-adaptive-installed
WARMED := $(VENV)/.hvd-adaptive-warmed
# horovodrun looks for mpirun on the path: the environment's own comes first.
RUN := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python
PIP_INSTALL := $(BIN)/python -m pip install --constraint $(CONSTRAINTS)
# Few modules of these packages are ever imported: Python compiles those at their first import.
EXTRAS_OF_DEMO := --no-compile --no-build-isolation --editable '.[horovod,examples]'
EXTRAS := --no-compile --no-build-isolation --editable '.[horovod,examples,test,dev,docs]'
# Prints the name of a step, and the seconds that its commands took: $(call step,NAME,COMMANDS).
COMMA := ,
step = @echo "== $(1)"; begin=$$(date +%s); { $(2); } || exit; \
  echo "== $(1): $$(($$(date +%s) - begin)) s"

# Rank checks have the cores to themselves: MPI's ranks spin while they wait, and take several times
# as long where others keep theirs from running.
RANK_CHECKS := tests/parallel/test_ranks.py
# `make test` takes a part of their cases.
SHORTENED := tests/parallel/test_accidents.py tests/parallel/test_ddp.py \
  tests/integration/test_slurm.py \
  tests/unit/kernels/test_cuda_compile.py tests/unit/test_reachable_states.py
# The rest is side by side, a file at a time, in this order: the long ones first, so that no worker
# is left with one at the end. More workers than processors were not faster.
OTHERS := --ignore $(RANK_CHECKS) --numprocesses logical --dist loadfile --no-loadscope-reorder \
  tests/parallel tests/integration tests/research tests/oracle tests/golden tests/repository \
  tests/tools tests/unit

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes import torch. Each one would compile torch's modules again, which takes
# several times as long as loading them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test ranks coverage lint docs package-test soak mutants bench clean distclean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(WARMED) ## build .venv: torch, Open MPI, stock Horovod, this package

demo: $(FOR_DEMO) ## train LeNet on MNIST on 4 ranks: float32, fp16, ALQ
	$(call step,demonstration,$(RUN) examples/mnist.py --demo)

test: setup ## run the whole suite
	@$(RUN) -m pytest $(RANK_CHECKS); ranks=$$?; $(RUN) -m pytest $(OTHERS) && exit $$ranks

ranks: setup ## run every rank check under every launcher, and everything that `make test` leaves out
	@HVD_ADAPTIVE_EVERY_CASE=1 $(RUN) -m pytest $(RANK_CHECKS) $(SHORTENED)
	@HVD_ADAPTIVE_EVERY_CASE=1 $(RUN) -m pytest -m "thorough or many" $(OTHERS)

coverage: setup ## run the whole suite and print the lines of the package that it does not run
	@rm -f .coverage .coverage.*
	@$(RUN) -m coverage run -m pytest $(RANK_CHECKS)
	@$(RUN) -m coverage run -m pytest $(OTHERS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report --show-missing --skip-covered --fail-under 95

lint: setup ## check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: setup ## build the documentation's pages into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package-test: setup ## build sdist and wheel, install the wheel into an empty environment, run the tests of one process there
	@$(RUN) tests/repository/packaged.py $(ARGS)

soak: setup ## 100,000 schedules of steps; two optimizers in any order; half an hour of elastic training, workers killed
	@HVD_ADAPTIVE_SCHEDULES=100000 $(RUN) -m pytest --timeout 0 tests/unit/run/test_schedules.py
	@HVD_ADAPTIVE_SCHEDULES=5000 $(RUN) -m pytest --timeout 0 tests/unit/hooks -k any_schedule
	@HVD_ADAPTIVE_RUNS=500 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	  $(BIN)/mpirun -np 3 --oversubscribe $(BIN)/python -m pytest -q --timeout 3600 \
	  -o python_files='check_*.py' tests/parallel/ranks/check_orders.py -k random_orders
	@$(RUN) tests/soak/soak.py

mutants: setup ## plant 130 faults in codec/, exchange/ and run/, and count those that tests find
	@$(RUN) tests/mutation/mutate.py

bench: setup ## measure encode and decode against memcpy
	@$(BIN)/hvd-adaptive bench codec

clean: ## remove caches and build products
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage .coverage.* $(WARMED)
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## ... and .venv (built Horovod wheels stay in the user's cache)
	rm -rf $(VENV)

# pip is the last thing that venv writes: where it is missing, an earlier attempt was cut off.
$(FOR_DEMO): $(SOURCES_OF_SETUP)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "hvd_adaptive set-up: Python 3.10 or newer is needed, '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1); name another: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -I hvd_adaptive/tools/install/preflight.py
	$(call step,virtual environment $(VENV),test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV))
	$(call step,packages of the demonstration,$(PIP_INSTALL) --quiet setuptools wheel && \
	  $(PIP_INSTALL) $(EXTRAS_OF_DEMO))
	$(call step,stock Horovod,$(BIN)/hvd-adaptive install-horovod)
	@touch $@

# Kernels stay compiled if only the demonstration's part was missing.
$(INSTALLED): $(SOURCES_OF_SETUP) | $(FOR_DEMO)
	$(call step,packages of tests$(COMMA) lint and pages,$(PIP_INSTALL) $(EXTRAS))
	@touch $@

$(WARMED): $(INSTALLED) $(wildcard hvd_adaptive/kernels/*.py hvd_adaptive/kernels/*/*.py)
	$(call step,compiling the kernels into Numba's cache,$(BIN)/python -m hvd_adaptive.kernels)
	@touch $@
