# `make demo` and `make test` set up .venv themselves. The targets that need a GPU, test-gpu and bench, install nothing: they run in an
# environment that has torch, Triton, numpy, pytest and safetensors, such as a CUDA image.
PYTHON ?= python3
VENV := .venv/bin
WORKERS := -n auto --maxprocesses 8 # one a core; each imports torch

.PHONY: demo test test-slow test-gpu lint bench clean

demo: .venv/installed-test
	$(VENV)/python examples/compiled_drafter.py

# The tests of a file stay together where they share compiled functions. Triton's interpreter replaces its compiler for a whole process, so the
# tests of the kernels on the CPU have a run of their own.
test: .venv/installed-test
	$(VENV)/python -m pytest $(WORKERS) --dist loadfile --doctest-modules -m "not slow and not gpu" dspark_ops tests
	TRITON_INTERPRET=1 $(VENV)/python -m pytest $(WORKERS) -m "not slow and not gpu" -k interpreted tests

test-slow: .venv/installed-test
	$(VENV)/python -m pytest $(WORKERS) --dist loadfile -m "slow and not gpu" tests

test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu tests

lint: .venv/installed-dev
	$(VENV)/ruff check
	$(VENV)/ruff format --check
	$(VENV)/mypy -p dspark_ops

bench:
	PYTHONPATH=. $(PYTHON) -m dspark_ops.bench

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamp of an extra: its packages are there, and pyproject.toml has not changed since.
.venv/installed-%: pyproject.toml
	test -x $(VENV)/python || $(PYTHON) -m venv .venv
	$(VENV)/python -m pip install --editable '.[$*]'
	touch $@
