"""One converted linear as a server multiplies with it: FP8 weight, its scale, and the scale of its input."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.linear import FP8Linear, FP8TransposedLinear
from foundry_fp8.numerics.operands import quantize
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["ServedLinear", "check_recipe", "served_linear"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedLinear:
    """``y = (cast(x / input_scale) @ weight.T) * input_scale * weight_scale``, summed in float32.

    Attributes:
        weight: ``[out_features, in_features]`` float8_e4m3fn.
        weight_scale: ``[1]`` float32, with scales of rows ``[out_features, 1]``: the weight's scale_inv, and what the layer multiplies its
            output by.
        input_scale: ``[1]`` float32: x's scale_inv; ``None``: the server takes it from each input's amax.
        rounding: The quantised weight's distance from the weight, as a share of its norm.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    rounding: float


def check_recipe(recipe: Recipe) -> None:
    """Whether the layout can say what ``recipe`` does.

    Raises:
        ConfigError: It cannot.
    """
    if recipe.kind not in ("tensor", "row", "constant"):
        raise ConfigError(
            f"recipe: {recipe.name} has a scale a block, and this layout has one a tensor: served so, the model would round "
            "otherwise than it was trained to. unit, delayed and current can be exported. Serve this one in high precision "
            "(its checkpoint is that of the BF16 model), or quantise it with a tool for block scales."
        )


def served_linear(name: str, linear: FP8Linear, recipe: Recipe, dtype: torch.dtype) -> ServedLinear:
    """What ``linear`` runs with in its forward, for a server.

    The weight is rounded as in training: to ``dtype``, what the forward computes in, then to E4M3. ``unit``: constant scales, and
    the output multiplier becomes the weight's. ``delayed``: the scales of the next forward. ``current``: the weight's amax,
    and the input's as it comes.

    Args:
        name: Of the layer, for messages.
        linear: Converted; its weight whole and on this process.
        recipe: That it runs.
        dtype: hp.

    Raises:
        ConfigError: Its recipe has scales of another form (:func:`check_recipe`), or it holds its weight transposed.
        RuntimeError: No delayed scale was ever set, or the weight is not finite.
    """
    if isinstance(linear, FP8TransposedLinear):
        raise ConfigError(
            f"{name}: it holds its weight as [in, out] (transformers' Conv1D), for which this layout has no form."
        )
    slots = linear.slots or {}
    if recipe.uses_history and not bool((slots["x"].amax_history != 0).any()):
        raise RuntimeError(
            f"{name}: no input was ever seen, so that there is no scale for it. Export after training, or load the FP8 state of "
            "a checkpoint first (FP8State.load_state_dict)."
        )
    weight = linear.matrix.detach().to("cpu", dtype)
    scale = slots["w"].scale if recipe.uses_history else None
    quantized = quantize(weight, "w", recipe, along=1, scale=scale)
    if not bool(torch.isfinite(weight).all()):
        raise RuntimeError(f"{name}: its weight holds an Inf or a NaN.")
    input_scale = None
    if recipe.uses_history:
        input_scale = slots["x"].scale.reciprocal().reshape(1)
    elif recipe.kind == "constant":
        input_scale = torch.ones(1, dtype=torch.float32, device="cpu")
    restored = quantized.data.float() * quantized.scale_inv
    return ServedLinear(
        weight=quantized.data,
        weight_scale=torch.atleast_1d(quantized.scale_inv * linear.output_multiplier),
        input_scale=input_scale,
        rounding=float((restored - weight.float()).norm() / weight.float().norm().clamp(min=1e-30)),
    )
