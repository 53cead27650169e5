"""Linears with a constant output multiplier, which µnit Scaling's models are made of, and their FP8 form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.recipes import Recipe, UnitScaling

__all__ = ["FP8UnitLinear", "UnitLinear", "choose_gradient_scale", "set_multiplier"]


class UnitLinear(nn.Linear):
    """``y = alpha x W^T`` with unit normal weights and ``alpha = 1 / sqrt(in_features)``; no bias.

    The same alpha scales the gradients of x and W, as autograd has it.

    Args:
        in_features: Size of the last dimension of x.
        out_features: Of y.
        bias: Must be false: the multiplier keeps the variance of a product, and a bias would add its own.
        device: Where to create the weight.
        dtype: Of the weight.
        output_multiplier: Another alpha; a head's is ``1 / in_features``.

    Raises:
        ValueError: ``bias`` is true.

    Source:
        Narayan et al., arXiv 2502.05967, table 1 and section 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        output_multiplier: float | None = None,
    ) -> None:
        if bias:
            raise ValueError("UnitLinear has no bias. For MPT, set model.no_bias: true.")
        self.output_multiplier = (
            1 / math.sqrt(in_features) if output_multiplier is None else output_multiplier
        )
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, 1)."""
        nn.init.normal_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """``input``: ``[..., in_features]``."""
        return F.linear(input, self.weight) * self.output_multiplier

    def extra_repr(self) -> str:
        """The linear's own, with the multiplier."""
        return f"{super().extra_repr()}, output_multiplier={self.output_multiplier:.4g}"


def set_multiplier(model: nn.Module, multiplier: float | None) -> None:
    """Give every :class:`UnitLinear` of ``model`` this output multiplier; ``None`` leaves each its own."""
    if multiplier is not None:
        for module in model.modules():
            if isinstance(module, UnitLinear):
                module.output_multiplier = multiplier


class FP8UnitLinear(FP8Linear):
    """The converted form of a :class:`UnitLinear`. It runs the recipe ``unit``, which gives the multiplier to the GEMMs.

    Attributes:
        chosen_gradient_scale: What ``gradient_scale: auto`` means in this run; ``None`` before anyone chose.
    """

    chosen_gradient_scale: int | None = None

    def choose_gradient_scale(self, scale: int) -> None:
        """From now on, what a recipe with ``gradient_scale: auto`` runs with."""
        self.chosen_gradient_scale = scale
        self.set_recipe(self.recipe)

    def set_recipe(self, recipe: Recipe | None) -> None:
        """Run ``recipe`` from the next forward on; ``None`` runs high precision.

        Raises:
            RuntimeError: Another recipe than ``unit``.
        """
        if recipe is not None and recipe.for_any_model:
            raise RuntimeError(
                f"{self.fqn}: it has µnit Scaling's output multiplier, which the recipe {recipe.name} does not give to its "
                "GEMMs. It runs unit, or high precision."
            )
        if _waits(recipe) and self.chosen_gradient_scale is not None:
            recipe = dataclasses.replace(recipe, gradient_scale=self.chosen_gradient_scale)
        super().set_recipe(recipe)

    def _compute(self, input: Tensor) -> Tensor:
        if self.runs_fp8 and torch.is_grad_enabled():
            assert self.recipe is not None
            self.recipe.scaling("dy", 1)  # raises where it is still to be chosen
        return super()._compute(input)


def _waits(recipe: Recipe | None) -> TypeGuard[UnitScaling]:
    """Whether its gradient scale is still to be chosen."""
    return isinstance(recipe, UnitScaling) and recipe.gradient_scale == "auto"


def choose_gradient_scale(modules: Iterable[nn.Module], tokens: int) -> tuple[int, int] | None:
    """Settle ``gradient_scale: auto`` (:meth:`UnitScaling.gradient_scale_for`) for those of ``modules`` that wait for it.

    Args:
        modules: Of one model.
        tokens: Over how many the loss is the mean.

    Returns:
        The scale and the width that it was chosen for; ``None`` where nothing waits.
    """
    waiting = [
        module
        for module in modules
        if isinstance(module, FP8UnitLinear)
        and any(map(_waits, module.recipes))
        and module.chosen_gradient_scale is None
    ]
    if not waiting:
        return None
    width = min(module.in_features for module in waiting)
    scale = UnitScaling.gradient_scale_for(tokens, width)
    for module in waiting:
        module.choose_gradient_scale(scale)
    return scale, width
