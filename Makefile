# make demo           train a small MPT in high precision and in FP8 on this machine, and compare
# make test           lint, types and the default tier of the tests: what every landing and pull request must pass
# make test-all       the same with every test
# make test-modern    the default tier on the modern stack (overrides-modern.txt), in .venv-modern
# make test-modern-all  every test there
# make test-newest    make test-trainers, then the default tier with today's torch under Composer (overrides-newest.txt), in .venv-newest
# make test-trainers  what needs no Composer, on what pip installs today (constraints-newest.txt), in .venv-trainers
# make newest-update  moves both files to today's releases and prints what changed
# make gpu            on a machine with a GPU, offline: foundry-fp8 selftest, then the tests that need one
# make coverage       branch coverage of the default tier, workers, launched runs and gloo ranks included
# make mutants        break the core on purpose; every break must be noticed by a test
# make benchmarks     measure again and compare the ratios with the committed ones; on a quiet machine
# make docs           the site, into build/site, its example executed; a broken link, command or name fails
# make release        build the site and the wheel, check the metadata, and try the wheel in a clean environment from another folder, the README's way too
# Each sets up .venv first (pinned by constraints.txt); the second time that is a no-op.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
MODERN  := .venv-modern
NEWEST  := .venv-newest
TRAINERS := .venv-trainers
ARGS    ?=
WORKERS ?= 2
PYTEST  := -m pytest -n $(WORKERS) --dist worksteal
DEFAULT := -m "not full"
# Tests start many Pythons, and each would compile torch and transformers anew: 20 s of CPU where 10 do.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: demo docs gpu test test-all test-modern test-modern-all test-newest test-trainers newest-update lint coverage mutants benchmarks release setup clean
demo: setup
	$(BIN)/foundry-fp8 demo $(ARGS)

# No setup: a GPU machine brings its own torch, and may have no network. PYTHON=... chooses it.
gpu:
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PYTHON) -m foundry_fp8.cli.main selftest $(ARGS)
	PYTHONPATH=$(CURDIR):$$PYTHONPATH $(PYTHON) -m pytest -q -p no:cacheprovider tests/gpu tests/kernels \
	  --ignore=tests/kernels/ptx --ignore=tests/kernels/test_compile.py

test: lint
	$(BIN)/python $(PYTEST) $(DEFAULT) $(ARGS)

test-all: lint
	$(BIN)/python $(PYTEST) $(ARGS)

test-modern: $(MODERN)/.installed
	$(MODERN)/bin/python $(PYTEST) $(DEFAULT) $(ARGS)

test-trainers: $(TRAINERS)/.installed
	$(TRAINERS)/bin/python $(PYTEST) $(DEFAULT) $(ARGS)

test-modern-all: $(MODERN)/.installed
	$(MODERN)/bin/python $(PYTEST) $(ARGS)

test-newest: $(NEWEST)/.installed test-trainers
	$(NEWEST)/bin/python $(PYTEST) $(DEFAULT) $(ARGS)

newest-update: setup
	cp constraints-newest.txt overrides-newest.txt $(VENV)
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.10 --no-annotate --custom-compile-command "make newest-update" \
	  --extra trainer --extra test-trainers pyproject.toml -o constraints-newest.txt
	for name in torch torchvision triton; do \
	  sed -i "s/^$$name==.*/$$(grep "^$$name==" constraints-newest.txt | tail -1 | cut -d' ' -f1)/" overrides-newest.txt; done
	-diff $(VENV)/constraints-newest.txt constraints-newest.txt; diff $(VENV)/overrides-newest.txt overrides-newest.txt

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

coverage: setup
	$(BIN)/python $(PYTEST) $(DEFAULT) --cov --cov-report=term-missing:skip-covered $(ARGS)

mutants: setup
	$(BIN)/python tests/mutants.py $(ARGS)

benchmarks: setup
	$(BIN)/python benchmarks/regression.py $(ARGS)

docs: setup
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

release: docs
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist
	$(BIN)/uv tool run --quiet twine check --strict dist/*
	.ci/wheel $(PYTHON) dist/*.whl
	.ci/first-page $(PYTHON) dist/*.whl
	tar -czf dist/foundry-fp8-site.tar.gz -C build site

setup: $(STAMP)

# uv installs the same wheels as pip in a fraction of the time; constraints.txt is its universal lock.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e ".[stack,test,torchao]"
	touch $@

# Past the pins of Composer and LLM Foundry: resolved anew, so that it tells when something moves.
$(MODERN)/.installed: pyproject.toml overrides-modern.txt
	$(PYTHON) -m venv $(MODERN)
	$(MODERN)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(MODERN)/bin/uv pip install --quiet --python $(MODERN)/bin/python --override overrides-modern.txt -e ".[stack,test]"
	touch $@

$(NEWEST)/.installed: pyproject.toml overrides-newest.txt
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(NEWEST)/bin/uv pip install --quiet --python $(NEWEST)/bin/python --override overrides-newest.txt -e ".[stack,test]"
	touch $@

# Compiled when installed: one of torchao's files warns when Python compiles it, and tests take warnings for errors.
$(TRAINERS)/.installed: pyproject.toml constraints-newest.txt
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(TRAINERS)/bin/uv pip install --quiet --compile-bytecode --python $(TRAINERS)/bin/python -c constraints-newest.txt \
	  -e ".[trainer,test-trainers]"
	touch $@

clean:
	rm -rf $(VENV) $(MODERN) $(NEWEST) $(TRAINERS) dist
