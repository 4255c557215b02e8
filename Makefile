# `make demo` and `make test` set up .venv themselves. The targets that need a GPU, test-gpu and bench, install nothing: they run in an
# environment that has torch, Triton, numpy, pytest and safetensors, such as a CUDA image.
PYTHON ?= python3
VENV := .venv/bin

.PHONY: demo test test-compiled test-interpreted test-slow test-gpu lint bench clean

demo: .venv/installed-test
	$(VENV)/python examples/compiled_drafter.py

test: .venv/installed-test
	$(MAKE) --jobs=2 test-compiled test-interpreted

test-compiled:
	$(VENV)/python -m pytest --doctest-modules -m "not slow and not gpu" dspark_ops tests

# Triton's interpreter replaces its compiler for a whole process, so the tests of the kernels on the CPU have one of their own. It runs beside
# the other tests and prints when it is done.
test-interpreted:
	@TRITON_INTERPRET=1 $(VENV)/python -m pytest -m "not slow and not gpu" -k interpreted tests > .venv/interpreted.log 2>&1; \
	status=$$?; cat .venv/interpreted.log; exit $$status

test-slow: .venv/installed-test
	$(VENV)/python -m pytest -m "slow and not gpu" tests

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
