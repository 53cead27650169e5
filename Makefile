# make demo   train a small MPT in high precision and in FP8 on this machine, and compare
# make test   lint, types, tests
# Both set up .venv first (pinned by constraints.txt); the second time that is a no-op.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.PHONY: demo test lint setup clean
demo: setup
	$(BIN)/foundry-fp8 demo $(ARGS)

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(STAMP)

# uv installs the same wheels as pip in a fraction of the time; constraints.txt is its universal lock.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e ".[stack,test]"
	touch $@

clean:
	rm -rf $(VENV)
