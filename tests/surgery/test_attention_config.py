"""``algorithms.fp8.attention`` as a YAML writes it, through ``apply_fp8``."""

import pytest
import torch

from foundry_fp8 import apply_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling
from foundry_fp8.surgery.apply import FP8Config
from foundry_fp8.surgery.attention import FP8AttentionState
from tests.surgery.conversion import convert_attention
from tests.surgery.test_attention import Plain


def converted(**options):
    model = Plain()
    report = apply_fp8(model, **options)
    return FP8AttentionState.of(model).modules, report


def test_true_stands_for_the_defaults():
    assert FP8Config(attention=True).attention == FP8Config(attention={}).attention
    assert FP8Config().attention is False and FP8Config(attention=False).attention is False
    modules, report = converted(recipe="current", attention=True)
    assert list(modules) == ["layers.0", "layers.1"]
    assert {row.reason for row in report.attention} == {"current, in a torch attention"}


def test_a_mapping_says_recipe_gradients_and_what_stays():
    modules, report = converted(
        recipe="block",
        attention={
            "recipe": {"name": "delayed", "amax_history_len": 3},
            "grad_scores": "bfloat16",
            "exclude": ["layers.1"],
        },
    )
    (attention,) = modules.values()
    assert attention.recipe == DelayedScaling(amax_history_len=3) and attention.grad_scores == "bfloat16"
    assert [row.reason for row in report.attention] == [
        "delayed with the logits' gradients in bfloat16, in a torch attention",
        "algorithms.fp8.attention.exclude leaves it out",
    ]
    assert report.recipe.name == "block" and "grad_scores=bfloat16" in repr(attention)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("yes", "attention: 'yes' is not true or false"),
        ({"grad_score": "fp8"}, "attention.grad_score: unknown key.*'grad_scores'"),
        ({"grad_scores": "e5m2"}, "attention.grad_scores: 'e5m2' is not one of fp8, bfloat16"),
        ({"recipe": "mxfp8"}, "attention.recipe: the mxfp8 recipe has no FP8 attention"),
        ({"recipe": "nvfp4"}, "attention.recipe: the nvfp4 recipe has no FP8 attention"),
        (
            {"recipe": {"name": "current", "granularity": "row"}},
            "attention.recipe: the current recipe with scales of rows has no FP8 attention",
        ),
        ({"exclude": "layers.0"}, "attention.exclude: 'layers.0' is not a list"),
        ({"exclude": ["layer.0"]}, "attention.exclude: pattern 'layer.0' matches none"),
    ],
    ids=lambda x: "" if isinstance(x, str) else str(x),
)
def test_what_is_wrong_is_named_with_its_whole_key(value, said):
    with pytest.raises(ConfigError, match=f"algorithms.fp8.{said}"):
        apply_fp8(Plain(), recipe="current", attention=value)


def test_transformer_engine_has_no_bfloat16_gradients_of_the_logits():
    with pytest.raises(
        ConfigError, match=r"cuDNN's kernel rounds .* Set grad_scores: fp8, or backend: emulated"
    ):
        convert_attention(
            Plain(), recipe=DelayedScaling(), backend="transformer_engine", grad_scores="bfloat16"
        )


def test_the_guard_steps_such_an_attention_down_to_current():
    modules, _ = converted(recipe="delayed", attention={"grad_scores": "bfloat16"})
    attention = modules["layers.0"]
    attention.set_recipe(CurrentScaling())
    assert attention.recipe == CurrentScaling() and torch.is_tensor(attention.slots["dp"].scale)
