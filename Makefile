# `make demo` and `make test` do all set-up themselves on a machine with Python 3.11 or newer, a C++20 compiler and a
# package registry. The set-up is repeated only when what it was made from has changed.

PYTHON ?= python3
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CMAKE := $(BIN)/cmake

NATIVE := $(wildcard fp_multi/_native/*.cpp fp_multi/_native/*.h)
NATIVE_TESTS := $(wildcard tests/native/*.cpp tests/native/*.h)
ADAPTERS := $(wildcard adapters)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help setup demo test lint format bench bench-more bench-check asan soak dist clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

# Pinned tools, torch, jax and the build requirements. An interrupted run leaves no stamp and is repeated.
$(VENV)/.packages: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) install torch==2.13.0 -c constraints.txt
	$(PIP) install -r constraints.txt
	@touch $@

# Editable: Python files are used where they are, only the native engine is built again when its sources change.
$(VENV)/.fp_multi: $(VENV)/.packages pyproject.toml CMakeLists.txt $(NATIVE)
	$(PIP) install --no-build-isolation -e '.[torch,orbax,cli,trainers]' -c constraints.txt
	@touch $@

setup: $(VENV)/.fp_multi ## make .venv with the package and all tools

demo: setup ## a training that is killed again and again and goes on bit for bit; how fast a save is
	$(BIN)/python examples/demo.py

test: setup ## every test that takes seconds; GPU tests skip without a GPU
	$(BIN)/python -m pytest -ra -m "not slow" $(PYTEST_ARGS)

soak: setup ## the tests that take minutes or gigabytes
	$(BIN)/python -m pytest -ra -m slow $(PYTEST_ARGS)

lint: setup ## ruff, mypy --strict, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict fp_multi $(ADAPTERS)
	$(BIN)/clang-format --dry-run -Werror $(NATIVE) $(NATIVE_TESTS)

format: setup ## let the formatters rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE) $(NATIVE_TESTS)

bench: setup ## the drive, saves, loads, training, import cost
	$(BIN)/python benchmarks/run.py

bench-more: setup ## parallel writers, DCP, Orbax, further contenders, model states
	$(BIN)/python benchmarks/run.py --more

bench-check: setup ## quick forms: which ratios got worse than benchmarks/results/quick.json
	$(BIN)/python benchmarks/check.py

asan: $(VENV)/.packages ## the native tests under the address and undefined-behaviour sanitizers
	$(CMAKE) -S . -B build/asan -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
		-DCMAKE_BUILD_TYPE=Debug -DFP_MULTI_NATIVE_TESTS=ON -DFP_MULTI_SANITIZE=address,undefined
	$(CMAKE) --build build/asan
	build/asan/fp_engine_test

dist: setup ## sdist and wheel in dist/
	$(BIN)/python -m build --no-isolation

clean: ## remove everything made here but the checkpoints you saved
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
