"""µnit Scaling's runs: an FP8 arm differs from its float32 arm in nothing but the recipe."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "unit_scaling"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of the folder; afterwards no module of the benchmarks is left under its short name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(FOLDER.parent)):
            sys.modules.pop(name)


@pytest.mark.parametrize("kind", ["mus_norm", "sp"])
def test_both_arms_have_the_same_learning_rates(kind, script):
    transfer = script("transfer")

    def rates(precision):
        model = transfer.model_of(kind, 64)
        if precision == "fp8":
            transfer.fp8(kind, model, 64)
        rate_of = {
            id(p): group["lr"] for group in transfer.groups(kind, model, 64, 0.5) for p in group["params"]
        }
        return {name: rate_of[id(parameter)] for name, parameter in model.named_parameters()}

    expected = rates("float32")
    assert rates("fp8") == expected
    assert len(set(expected.values())) == (1 if kind == "sp" else 2)


@pytest.mark.parametrize("name", ["gradients", "initial", "outliers"])
def test_its_scripts_find_what_they_import(name, script):
    assert callable(script(name).main)
