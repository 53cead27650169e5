"""One converted linear as a server multiplies with it: FP8 weight, its scale, and the scale of its input."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.dtensor import whole
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight, recipe_of
from foundry_fp8.layers.linear import FP8Linear, FP8TransposedLinear
from foundry_fp8.numerics.operands import quantize
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["ServedLinear", "check_recipe", "recipe_run_by", "served_linear"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedLinear:
    """``y = (cast(x / input_scale) @ weight.T) * input_scale * weight_scale``, summed in float32.

    Attributes:
        weight: ``[out_features, in_features]`` float8_e4m3fn.
        weight_scale: float32, ``[1]``, of rows ``[out_features, 1]`` or a block each (E8M0 for mxfp8): the weight's scale_inv, and what the
            layer multiplies its output by.
        input_scale: ``[1]`` float32: x's scale_inv; ``None``: the server takes it from each input's amax.
        rounding: The quantised weight's distance from the weight, as a share of its norm.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    rounding: float


def check_recipe(recipe: Recipe, layout: str) -> None:
    """Whether ``layout`` can say what ``recipe`` does.

    Raises:
        ConfigError: It cannot.
    """
    kinds = {"fp8": ("block", "mx"), "compressed-tensors": ("tensor", "row", "constant", "block")}
    if recipe.kind not in kinds[layout]:
        other = next((name for name, known in kinds.items() if recipe.kind in known), None)
        if other is None:
            raise ConfigError(
                f"export: neither layout has a place for the scales of {recipe.name}. Serve the checkpoint in high precision; it is that of "
                "the BF16 model."
            )
        raise ConfigError(
            f"export: the layout {layout} has no scales as those of {recipe.name}. --layout {other} (layout={other!r}) has."
        )


def recipe_run_by(module: nn.Module) -> Recipe | None:
    """What ``module`` multiplies its weight by: its recipe, that of a published weight's codes, or ``None`` in high precision."""
    weight = module._parameters.get("weight")
    if isinstance(weight, FrozenFP8Weight):
        return recipe_of(weight.scaling)
    return module.recipe if isinstance(module, FP8Linear) and module.fprop == "fp8" else None


def served_linear(
    name: str, linear: Any, recipe: Recipe, dtype: torch.dtype, device: str | None = None
) -> ServedLinear:
    """What ``linear`` runs with in its forward, for a server.

    The weight is rounded as in training: to ``dtype``, what the forward computes in, then to E4M3. ``unit``: constant scales, and
    the output multiplier becomes the weight's. ``delayed``: the scales of the next forward. ``current``: the weight's amax, and
    the input's as it comes. It lies where the weight does, unless ``device`` says otherwise.

    Raises:
        ConfigError: Its recipe has scales of another form (:func:`check_recipe`), or it holds its weight transposed.
        RuntimeError: No delayed scale was ever set, or the weight is not finite.
    """
    if isinstance(linear, FP8TransposedLinear):
        raise ConfigError(
            f"{name}: it holds its weight as [in, out] (transformers' Conv1D), for which this layout has no form."
        )
    scale_dtype = recipe.scaling("w", 1).scale_dtype
    if isinstance(linear.weight, FrozenFP8Weight):
        published = None if scale_dtype == torch.float32 else scale_dtype
        scale = torch.atleast_1d(linear.weight.scale).to(device, published)
        return ServedLinear(weight=linear.weight.codes.to(device), weight_scale=scale, input_scale=None, rounding=0.0)  # fmt: skip
    slots: Any = linear.slots or {}
    if recipe.uses_history and not bool((slots["x"].amax_history != 0).any()):
        raise RuntimeError(
            f"{name}: no input was ever seen, so that there is no scale for it. Export after training, or load the FP8 state of "
            "a checkpoint first (FP8State.load_state_dict)."
        )
    weight = whole(linear.matrix.detach()).to(device, dtype)
    given = slots["w"].scale if recipe.uses_history else None
    quantized = quantize(weight, "w", recipe, along=1, scale=given)
    if not bool(torch.isfinite(weight).all()):
        raise RuntimeError(f"{name}: its weight holds an Inf or a NaN.")
    input_scale = None
    if recipe.uses_history:
        input_scale = slots["x"].scale.reciprocal().reshape(1)
    elif recipe.scales_known:
        input_scale = torch.ones(1, dtype=torch.float32, device=weight.device)
    restored = quantized.dequantize()
    weight_scale = torch.atleast_1d(quantized.scale_inv * linear.output_multiplier)
    return ServedLinear(
        weight=quantized.data,
        weight_scale=weight_scale.to(scale_dtype),
        input_scale=input_scale,
        rounding=float((restored - weight.float()).norm() / weight.float().norm().clamp(min=1e-30)),
    )
