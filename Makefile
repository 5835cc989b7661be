# Everything sets itself up: `make demo` and `make test` need only Python and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
WORKERS ?= 2

# One thread per worker, and no AMX code paths: results are then the same on every x86 machine.
export OMP_NUM_THREADS ?= 1
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE

.PHONY: demo test fmt docs clean
.DEFAULT_GOAL := demo

demo: $(STAMP)
	OMP_NUM_THREADS=$$(nproc 2>/dev/null || echo 2) $(BIN)/quasidiag demo

test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

fmt: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch goes first and alone, by its exact pin: any other spelling may draw gigabytes of GPU packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt) -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[experiments,examples,dev]'
	touch $@
