"""A recipe is in one place: what it says of itself agrees, and one that stands in this file alone trains, or is refused by name."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.backends.transformer_engine.requirements import Machine, requirement
from foundry_fp8.numerics.operands import quantize
from foundry_fp8.numerics.quantize import Quantized, quantize_block
from foundry_fp8.numerics.recipes import RECIPES, BlockScaling, CurrentScaling, Recipe, parse_recipe
from foundry_fp8.numerics.scalings import Scaling
from tests.kernels.interpreter import interpret

EVERY = [
    *(cls() if name != "unit" else parse_recipe({"name": "unit", "gradient_scale": 64}) for name, cls in RECIPES.items()),
    CurrentScaling(granularity="row"),
    CurrentScaling(power_2_scales=True),
    BlockScaling(power_2_scales=False),
]  # fmt: skip


@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_what_a_recipe_says_agrees_with_its_scalings(recipe):
    found = {
        (operand, along): recipe.scaling(operand, along) for operand in ("x", "w", "dy") for along in (0, 1)
    }
    assert {scaling.kind for scaling in found.values()} == {recipe.kind}
    # A recipe whose scale is given says nothing of whether it is a power of two.
    assert {scaling.keeps_codes for scaling in found.values()} == {recipe.powers_of_two and not recipe.by_row}
    assert recipe.by_direction == (found["x", 0] != found["x", 1])
    assert recipe.by_row == (recipe.kind == "row")


@pytest.mark.parametrize("recipe", EVERY, ids=str)
@pytest.mark.parametrize("operand", ["x", "w", "dy"])
def test_codes_that_are_kept_are_quantised_to_themselves(recipe, operand):
    x = torch.randn(128, 256)
    scale = torch.tensor(4.0) if recipe.uses_history else None
    q = quantize(x, operand, recipe, scale=scale)
    again = quantize(q.dequantize(), operand, recipe, scale=scale)
    same = torch.equal(again.data.view(torch.uint8), q.data.view(torch.uint8))
    if recipe.scaling(operand, 1).keeps_codes or recipe.uses_history:
        assert torch.equal(again.dequantize(), q.dequantize())
    elif recipe.kind == "block":
        assert same  # the largest element is the largest code again


@dataclasses.dataclass(frozen=True)
class Stripes(Scaling):
    """One scale for 16 elements in a row, whatever is contracted."""

    kind = "stripes"

    def quantize(self, x, fmt, scale=None) -> Quantized:
        return quantize_block(x, (1, 16), fmt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StripesRecipe(Recipe):
    """In this file alone."""

    name: ClassVar[str] = "stripes"

    def scaling(self, operand, along):
        return Stripes()


def test_a_recipe_of_a_test_trains_in_emulation():
    model = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64))
    plain = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64))
    plain.load_state_dict(model.state_dict())
    report = foundry_fp8.apply_fp8(model, recipe=StripesRecipe(), backend="emulated", include=["*"])
    assert set(report.converted) == {"0", "2"}
    x, dy = torch.randn(32, 64), torch.randn(32, 64)
    for net in (model, plain):
        net(x).backward(dy)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert 0 < (ours.grad - theirs.grad).norm() < 0.1 * theirs.grad.norm() or ours.dim() == 1
    w = model[0].weight.detach()
    expected = (
        quantize(x, "x", StripesRecipe()).dequantize() @ quantize(w, "w", StripesRecipe()).dequantize().t()
    )
    torch.testing.assert_close(model[0](x), expected + model[0].bias, rtol=1e-5, atol=1e-5)


def test_the_other_backends_refuse_it_by_name(monkeypatch):
    interpret(monkeypatch)
    model = nn.Sequential(nn.Linear(64, 96))
    with pytest.raises(RuntimeError, match="no kernels for the scales of stripes"):
        foundry_fp8.apply_fp8(model, recipe=StripesRecipe(), backend="native", include=["*"])
    assert type(model[0]) is nn.Linear
    machine = Machine(capability=(9, 0), cuda=(12, 9), cublas=(12, 9), te=(2, 10))
    found = requirement(StripesRecipe(), machine)
    assert not found.ok and "stripes" in found.reason
