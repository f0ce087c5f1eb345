# Two commands for a fresh machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo

.PHONY: demo demo-width test test-fast test-all test-exhaustive test-pytorch-lightning test-versions lint types docs tests mutation bench bench-check gpu clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# Only what the demo needs, unless everything is there already.
$(DEMO): pyproject.toml constraints.txt
	[ $(READY) -nt pyproject.toml ] || $(PYTHON) -m venv $(VENV)
	[ $(READY) -nt pyproject.toml ] || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo]"
	touch $@

demo: $(DEMO)
	$(BIN)/python examples/demo.py

demo-width: $(DEMO)
	$(BIN)/python examples/repair.py

test: lint types docs tests

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/scripts/check_style.py
	$(BIN)/codespell

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

tests: $(READY)
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

# The inner loop, without processes: a minute.
FAST := functional linalg metrics quantities condition layers
test-fast: lint
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(FAST:%=tests/%)

test-all: test
	$(BIN)/python -m pytest -m "slow and not exhaustive" -n 2 --dist loadfile --ignore=tests/distributed
	$(BIN)/python -m pytest -m "slow and not exhaustive" tests/distributed

# The same on many more cases, before a release.
test-exhaustive: test-pytorch-lightning
	$(BIN)/python -m pytest -m exhaustive -n 2 --dist loadfile --ignore=tests/distributed
	$(BIN)/python -m pytest -m exhaustive tests/distributed

# What a trainer of `lightning` does, one of `pytorch_lightning` does: the same tests under its name.
test-pytorch-lightning: $(READY)
	$(BIN)/python tests/renamed.py -m "not slow" -n 2 --dist loadfile \
		$(patsubst %,tests/%,callbacks resume loops noninterference correction distributed)

# The oldest and the newest versions; the table is in docs/support.md.
test-versions:
	$(PYTHON) tests/versions.py

# Changes the source at random places and asks whether a test notices: half an hour a package.
mutation: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[mutation]"
	for package in linalg functional condition correction; do $(BIN)/python -m tests.mutation.run $$package; done

bench: $(READY)
	$(BIN)/python -m benchmarks.accuracy.estimator --quick
	$(BIN)/python -m benchmarks.cost
	$(BIN)/python -m benchmarks.counting.scaling --quick
	$(BIN)/python -m benchmarks.rates.transfer --quick --results /dev/null --tasks "MLP, Adam"

bench-check: $(READY)
	$(BIN)/python -m benchmarks.cost --check

# On a machine with an accelerator, at most eight minutes; writes docs/gpu.md.
gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu

clean:
	rm -rf $(VENV) build site *.egg-info .mypy_cache .ruff_cache .pytest_cache
