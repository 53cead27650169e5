"""What an LLM Foundry YAML can say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NAMES = {
    "mfu_monitor": "MFUMonitor",
    "kurtosis_monitor": "KurtosisMonitor",
    "fp8_monitor": "FP8Monitor",
    "divergence_guard": "DivergenceGuard",
}
SECTIONS = 8


@pytest.mark.parametrize(("name", "cls"), NAMES.items())
def test_the_name_in_a_yaml_finds_the_class(name, cls):
    from llmfoundry.registry import callbacks

    found = callbacks.get(name)
    assert found.__name__ == cls
    assert found.__module__.startswith(f"foundry_fp8.callbacks.{name}")


@pytest.mark.parametrize("name", NAMES)
def test_the_card_has_its_sections_and_every_option(name):
    import dataclasses
    import importlib

    module = importlib.import_module(f"foundry_fp8.callbacks.{name}")
    card = (Path(module.__file__).parent / "README.md").read_text()
    assert re.findall(r"^## (\d)", card, re.M) == [str(i + 1) for i in range(SECTIONS)]
    fields = [field.name for field in dataclasses.fields(getattr(module, f"{NAMES[name]}Config"))]
    assert re.findall(r"^\| `(\w+)` \| [^|]+ \| ", card.split("## 4")[0], re.M) == fields
