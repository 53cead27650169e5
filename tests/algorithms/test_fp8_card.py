"""The method card of `fp8`, docs/fp8_layers.md and docs/backends.md: their code runs, and their tables of recipes and attention
are those of the configuration.
"""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import yaml

import foundry_fp8
from foundry_fp8.config import ConfigError, from_mapping
from foundry_fp8.numerics.recipes import RECIPES
from foundry_fp8.surgery.apply import KEY, FP8Config, refuse_by_backend
from foundry_fp8.surgery.fp8_config import AttentionConfig

CARD = (Path(foundry_fp8.__file__).parent / "algorithms/fp8/README.md").read_text()
DOCS = Path(foundry_fp8.__file__).parents[1] / "docs"
BACKENDS = DOCS / "backends.md"
LAYERS = DOCS / "fp8_layers.md"


def blocks(text, language):
    return re.findall(rf"^ *```{language}\n(.*?)```", text, re.S | re.M)


@pytest.mark.parametrize("code", blocks(CARD, "python"))
def test_python_of_the_card_runs(code):
    exec(compile(code, "card", "exec"), {})


def test_yaml_of_the_card_is_a_valid_configuration():
    for code in blocks(CARD, "yaml"):
        from_mapping(FP8Config, yaml.safe_load(code)["algorithms"]["fp8"], KEY)


def rows(text, marker):
    table = text.split(f"<!-- {marker}", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[3:]]


def test_fields_of_attention_are_those_of_its_config():
    documented = {
        row[0].strip("`"): yaml.safe_load(row[1].strip("`")) for row in rows(LAYERS.read_text(), "attention")
    }
    fields = {f.name: f.default for f in dataclasses.fields(AttentionConfig)}
    assert documented == {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}


def test_recipe_fields_are_those_of_the_recipes():
    documented = {
        (recipe, row[1].strip("`")): row[2]
        for row in rows(CARD, "recipes")
        if row[0] != "all"
        for recipe in row[0].split(", ")
    }
    fields = {
        (name, f.name): list(f.default) if isinstance(f.default, tuple) else f.default
        for name, cls in RECIPES.items()
        for f in dataclasses.fields(cls)
        if f.name != "fp8_format"
    }
    assert {key: yaml.safe_load(value.strip("`")) for key, value in documented.items()} == fields


def test_the_backend_of_the_guide_can_be_written_as_shown():
    (code,) = (b for b in blocks(BACKENDS.read_text(), "python") if "class MyBackend" in b)
    namespace = {}
    exec(compile(code, "guide", "exec"), namespace)
    backend = namespace["MyBackend"]()
    assert not backend.availability(None, torch.device("cpu")).ok
    for option in (
        {"fuse": True},
        {"cache_weights": True},
        {"accumulation": "hopper"},
    ):  # of which it says nothing
        with pytest.raises(ConfigError, match=rf"fp8\.{next(iter(option))}: not with the mine backend"):
            refuse_by_backend(FP8Config(**option), backend)
    refuse_by_backend(FP8Config(), backend)
