# `make demo` and `make test` do all the set-up that they need on a fresh machine.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Two test processes, one thread each: the suite's tensors are small.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-thorough lint typecheck bench bench-ranks docs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## train on real handwritten digits, replay half of the run, draw a picture
	$(BIN)/python examples/digits.py

test: $(STAMP)  ## the fast tier: about eight minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not thorough"

test-thorough: $(STAMP)  ## more examples and the slow laws
	PURE_LOOP_THOROUGH=1 $(BIN)/python -m pytest -n 2 --timeout=3600

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)  ## cost of a step against the hand-written loop, as ratios in one run
	$(BIN)/python -m tests.benchmarks

bench-ranks: $(STAMP)  ## cost of a step on two ranks against DDP and fully_shard, as ratios in one run
	$(BIN)/python -m tests.benchmarks.ranks

docs: $(STAMP)  ## write the generated parts of README.md and docs/ anew
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
