# `make demo` and `make test` do all the set-up that they need on a fresh machine.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
# Other libraries, which are measured and not used: an environment of their own.
PEERS ?= .venv-peers
PEERS_STAMP := $(PEERS)/.installed
# Triton beside the environment and not in it: torch's compiler asks for it on a CPU, too, where it is there.
TRITON ?= .triton
TRITON_STAMP := $(TRITON)/.installed
BENCH ?=
# The torch to install, and with which versions of the rest: `make test TORCH="torch~=2.11.0" CONSTRAINTS=other.txt`.
TORCH ?= torch
CONSTRAINTS ?= constraints.txt

# Two test processes, one thread each: the suite's tensors are small.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow test-thorough test-shuffled test-compiler test-simulated-gpu test-triton gpu lint typecheck coverage dist bench bench-peers bench-page bench-ranks laws-of-peers cards tables docs docs-site clean \
	new-algorithm new-callback new-logger new-metric new-optimizer new-schedule

# What `make demo` needs: torch and the package, and what the example reads its data and draws its picture with.
$(DEMO_STAMP): pyproject.toml $(CONSTRAINTS) pure_loop/_internal/version.py
	@echo "Installing torch, pure_loop, scikit-learn and matplotlib, with what they need, into $(VENV)."
	@echo "That takes about a minute, of which most is torch's download; without a cache of pip it is longer."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) $(TORCH) --editable . scikit-learn matplotlib
	@touch $@

$(STAMP): $(DEMO_STAMP)
	@echo "Installing what the tests need, about 170 packages more, into $(VENV). That takes one to three minutes."
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable . --group dev
	@touch $@

demo: $(DEMO_STAMP)  ## train on real handwritten digits, replay half of the run, draw a picture
	$(BIN)/python examples/digits.py

test: $(STAMP)  ## the fast tier: eight minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not thorough"

test-slow: $(STAMP)  ## the slow tier of CI: real processes, real compilers, the code of the docs; fifteen minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not thorough"

test-thorough: $(STAMP)  ## more examples and the slow laws
	PURE_LOOP_THOROUGH=1 $(BIN)/python -m pytest -n 2 --timeout=3600

SEED ?= 0
test-shuffled: $(STAMP)  ## the fast tier in another order, with other examples and numbers: SEED=3
	PURE_LOOP_SEED=$(SEED) $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not thorough" \
		--hypothesis-seed=$(SEED)

COMPILED := test_compile test_graphs test_refusals test_kept test_inductor

test-compiler: $(STAMP)  ## compiled steps through torch's compiler, and not operation by operation: about 40 minutes
	PURE_LOOP_COMPILER=1 $(BIN)/python -m pytest -n 2 --timeout=3600 $(COMPILED:%=tests/compile/%.py)

test-simulated-gpu: $(STAMP)  ## the tests that need a GPU, on one that computes on the CPU: two minutes, with g++
	$(BIN)/python -m pytest -n 2 -p tests.simulated_gpu.plugin -m "gpu and not thorough"

$(TRITON_STAMP): constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --constraint constraints.txt --target $(TRITON) triton
	@touch $@

# What is compiled, and what is interpreted, are processes of their own: triton asks which when it is imported.
test-triton: $(STAMP) $(TRITON_STAMP)  ## compiled steps as kernels for a GPU, on a simulated one: two minutes, with g++
	PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -n 2 -p tests.simulated_gpu.plugin \
		-m "gpu and not thorough" tests/compile/test_triton.py
	PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -p tests.simulated_gpu.plugin \
		-m "gpu and not thorough" tests/compile/test_triton_numbers.py

# The interpreter as it is, and no environment: a machine with a GPU may have no network.
DEVICE ?= cuda
MINUTES ?= 8
OUT ?= .

gpu:  ## try and measure all on a GPU, offline, into OUT/gpu.json: PYTHON=python3 MINUTES=8 DEVICE=cuda
	$(PYTHON) -m bench.gpu --device $(DEVICE) --minutes $(MINUTES) --output $(OUT)/gpu.json

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check --line-length 88 docs/*.md docs/*/*.md

typecheck: $(STAMP)
	$(BIN)/mypy

# Each worker of pytest is a process; the tests of ownership need the plugin, which says why.
CORE := pure_loop/loop/*,pure_loop/verify/*,pure_loop/stages/*,pure_loop/order/*,pure_loop/state.py
CORE_TESTS := order state stages loop verify ownership entry laws

coverage: $(STAMP)  ## lines and branches of the core that tests run, on a CPU and a simulated GPU; fails below 95%
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -n 2 --dist loadfile -p tests.support.measured \
		-m "not slow and not thorough" $(CORE_TESTS:%=tests/%)
	$(BIN)/python -m coverage run -m pytest -n 2 --dist loadfile -p tests.simulated_gpu.plugin -p tests.support.measured \
		-m "gpu and not thorough" $(CORE_TESTS:%=tests/%)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --include='$(CORE)' --skip-covered --show-missing --fail-under=95

dist: $(STAMP)  ## the sdist and the wheel of a release in dist/, and what a package index says of them
	rm -rf dist
	$(BIN)/python -m hatchling build -t sdist -t wheel
	$(BIN)/python -m twine check --strict dist/*

bench: $(STAMP)  ## cost of a step against the hand-written loop, as ratios in one run; BENCH="--compile" for options
	$(BIN)/python -m bench.performance $(BENCH)

# torch first, or what depends on it brings the build for CUDA. Composer asks for an older torch, so without its own.
$(PEERS_STAMP): pyproject.toml constraints.txt bench/performance/requirements.txt bench/performance/composer.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(PEERS)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[plot]'
	$(PEERS)/bin/python -m pip install --quiet --requirement bench/performance/requirements.txt
	$(PEERS)/bin/python -m pip install --quiet --no-deps --requirement bench/performance/composer.txt
	@touch $@

bench-peers: $(PEERS_STAMP)  ## the same, with other libraries' loops
	$(PEERS)/bin/python -m bench.performance $(BENCH)

bench-page: $(PEERS_STAMP) $(STAMP)  ## measure the tables and the chart of docs/performance.md anew, and write the page
	$(PEERS)/bin/python -m bench.performance --compile --output docs/benchmark.json --plot docs/benchmark.png
	$(BIN)/python docs/generate.py

laws-of-peers: $(PEERS_STAMP) $(STAMP)  ## try the laws on other libraries, and write the tables of them: ten minutes
	$(PEERS)/bin/python -m bench.peers
	$(BIN)/python docs/generate.py

bench-ranks: $(STAMP)  ## cost of a step on two ranks against DDP and fully_shard, as ratios in one run
	$(BIN)/python -m bench.performance.ranks

cards: $(STAMP)  ## measure the cards of algorithms anew, or NAME=mixup alone: half an hour
	$(BIN)/python -m bench.cards $(NAME)
	$(BIN)/python docs/generate.py --tables

tables: $(STAMP)  ## write what is made from the modules anew: __init__.py of packages, tables, reference, cards
	$(BIN)/python docs/generate.py --tables

docs: $(STAMP)  ## those, and what the code of all pages prints: five minutes
	$(BIN)/python docs/generate.py

docs-site: $(STAMP)  ## build the site of docs/ into site/, strictly: a broken link, a warning or raw markup fails
	$(BIN)/python docs/build_site.py

new-algorithm new-callback new-logger new-metric new-optimizer new-schedule: $(STAMP)  ## NAME=lookahead: skeletons of a method and its test
	$(BIN)/python docs/new.py $(@:new-%=%) $(NAME)

clean:
	rm -rf $(VENV) $(PEERS) $(TRITON) dist site .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
