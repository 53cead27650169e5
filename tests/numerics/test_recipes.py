import dataclasses

import pytest

from foundry_fp8.config import ConfigError
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.recipes import (
    GEMMS,
    RECIPES,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    parse_recipe,
)


@pytest.mark.parametrize("name", RECIPES)
def test_a_name_gives_the_default_recipe_and_to_dict_round_trips(name):
    recipe = parse_recipe(name)
    assert recipe == RECIPES[name]() and parse_recipe(recipe.to_dict()) == recipe


def test_formats_per_operand():
    assert [DelayedScaling().format(o) for o in ("x", "w", "dy")] == [E4M3, E4M3, E5M2]
    assert [MXFP8Scaling().format(o) for o in ("x", "w", "dy")] == [E4M3] * 3
    assert BlockScaling(fp8_format="hybrid").format("dy") is E5M2


@pytest.mark.parametrize(
    "value, message",
    [
        ("delayd", r"recipe: 'delayd' is not a recipe.*Did you mean 'delayed'"),
        ({"margin": 1}, r"recipe\.name: no name given"),
        (
            {"name": "current", "margin": 1},
            r"recipe\.margin: unknown key\. Recipe current takes .*power_2_scales",
        ),
        ({"name": "delayed", "amax_histroy_len": 4}, "Did you mean 'amax_history_len'"),
        ({"name": "delayed", "margin": -1}, r"recipe\.margin: -1 is not an integer of at least 0"),
        ({"name": "delayed", "margin": True}, "True is not an integer"),
        ({"name": "delayed", "amax_history_len": 0}, "at least 1"),
        ({"name": "delayed", "amax_compute_algo": "mx"}, "Did you mean 'max'"),
        (
            {"name": "delayed", "fast_accumulation": ["fprp"]},
            r"recipe\.fast_accumulation\[0\]: 'fprp' .*Did you mean 'fprop'",
        ),
        (
            {"name": "current", "fast_accumulation": "fprop"},
            r"recipe\.fast_accumulation: 'fprop' is not a list",
        ),
        ({"name": "block", "fast_accumulation": []}, r"recipe\.fast_accumulation: unknown key"),
        ({"name": "current", "power_2_scales": 1}, "1 is not true or false"),
        (
            {"name": "mxfp8", "fp8_format": "e5m2"},
            r"recipe\.fp8_format: 'e5m2' is not one of hybrid, e4m3",
        ),
        (3, "neither a recipe's name"),
        ({"name": ["delayed"]}, r"recipe\.name: \['delayed'\] is not a recipe"),
        ({"name": "delayed", "margin": 17}, "at most 16"),  # 2^17 below an amax E4M3 has nothing left
    ],
)
def test_bad_recipes_name_the_key_the_value_and_what_is_allowed(value, message):
    with pytest.raises(ConfigError, match=message):
        parse_recipe(value)


def test_the_forward_alone_accumulates_fast_unless_asked_and_only_where_there_is_a_choice():
    """Transformer Engine's and torchao's default for one scale a tensor; block scales are promoted whatever one asks."""
    fast = {name: [g for g in GEMMS if RECIPES[name]().accumulates_fast(g)] for name in RECIPES}
    one_scale = {name: ["fprop"] for name in ("delayed", "current", "unit")}
    assert fast == {**one_scale, "block": [], "mxfp8": [], "nvfp4": []}
    chosen = parse_recipe({"name": "current", "fast_accumulation": ["wgrad", "fprop"]})
    assert [g for g in GEMMS if chosen.accumulates_fast(g)] == ["fprop", "wgrad"]
    assert parse_recipe({"name": "delayed", "fast_accumulation": []}).fast_accumulation == ()
    assert hash(chosen) == hash(CurrentScaling(fast_accumulation=("fprop", "wgrad")))


def test_recipes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CurrentScaling().power_2_scales = True
