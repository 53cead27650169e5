"""One converted linear as a server multiplies with it: FP8 weight, its scale, and the scale of its input."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.compat.checkpoint_form import checkpoint_form
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.dtensor import whole
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight, recipe_of, row_scales
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from foundry_fp8.layers.grouped_linear import FP8GroupedLinear
from foundry_fp8.layers.linear import FP8TransposedLinear
from foundry_fp8.numerics.operands import quantize
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["ServedLinear", "check_experts", "check_recipe", "recipe_run_by", "served_weight", "stored"]


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


def check_experts(model: Any, key: str, weight: Tensor, layer: Any, recipe: Recipe) -> None:
    """Raise :class:`ConfigError` where a checkpoint has no place for ``weight``, if it is one parameter of experts; before any work."""
    if weight.dim() < 3 and not isinstance(layer, FP8GroupedLinear):
        return
    (part, *_) = checkpoint_form(
        model, {key: torch.empty(weight.shape, dtype=weight.dtype, device="meta")}
    ).values()
    block = getattr(recipe.scaling("w", 1), "block", None)
    if isinstance(weight, FrozenFP8Weight):
        fits = weight.block is not None and weight.block[1] == (block or weight.shape[1:])[1]
    else:
        fits = tuple(weight.shape) == (layer.experts, layer.out_features, layer.in_features)
        if part.dim() == 2 and block and len(part) < layer.out_features and len(part) % block[0]:
            raise _in_two(key, block[0])
    if part.dim() != 2 or not fits:
        raise ConfigError(
            f"export: {key} holds experts in one parameter, for which the layout has no place. Serve the checkpoint in high "
            "precision; it is that of the BF16 model."
        )


def _in_two(key: str, rows: int) -> ConfigError:
    return ConfigError(
        f"export: {key}: a block of {rows} rows lies in gate_proj and in up_proj, which checkpoints have apart. Train experts of a multiple "
        f'of {rows} features, or leave them out of FP8 (algorithms.fp8.exclude: ["*.experts.*"]).'
    )


def recipe_run_by(layer: Any, weight: Any) -> Recipe | None:
    """What ``layer`` multiplies its ``weight`` by: its recipe, that of a published weight's codes, or ``None`` in high precision."""
    if isinstance(weight, FrozenFP8Weight):
        return recipe_of(weight.scaling)
    return layer.recipe if isinstance(layer, FP8GemmLayer) and layer.fprop != "high_precision" else None


def served_weight(
    name: str, layer: Any, weight: Tensor, recipe: Recipe, dtype: torch.dtype, device: str | None = None
) -> ServedLinear:
    """What ``layer`` multiplies by in its forward, for a server: of ``weight``, its own or that of one of its experts.

    The weight is rounded as in training: to ``dtype``, what the forward computes in, then to E4M3. ``unit``: constant scales, and
    the output multiplier becomes the weight's. ``delayed``: the scales of the next forward. ``current``: the weight's amax, and
    the input's as it comes. It lies where the weight does, unless ``device`` says otherwise.

    Raises:
        ConfigError: Its recipe has scales of another form (:func:`check_recipe`), or it holds its weight transposed.
        RuntimeError: No delayed scale was ever set, or the weight is not finite.
    """
    if isinstance(layer, FP8TransposedLinear):
        raise ConfigError(
            f"{name}: it holds its weight as [in, out] (transformers' Conv1D), for which this layout has no form."
        )
    scale_dtype = recipe.scaling("w", 1).scale_dtype
    if isinstance(weight, FrozenFP8Weight):
        published = None if scale_dtype == torch.float32 else scale_dtype
        scale = torch.atleast_1d(weight.scale).to(device, published)
        return ServedLinear(
            weight=weight.codes.to(device), weight_scale=scale, input_scale=None, rounding=0.0
        )
    slots: Any = layer.slots or {}
    if recipe.uses_history and not bool((slots["x"].amax_history != 0).any()):
        raise RuntimeError(
            f"{name}: no input was ever seen, so that there is no scale for it. Export after training, or load the FP8 state of "
            "a checkpoint first (FP8State.load_state_dict)."
        )
    weight = whole(weight.detach()).to(device, dtype)
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
    weight_scale = torch.atleast_1d(quantized.scale_inv * layer.output_multiplier)
    return ServedLinear(
        weight=quantized.data,
        weight_scale=weight_scale.to(scale_dtype),
        input_scale=input_scale,
        rounding=float((restored - weight.float()).norm() / weight.float().norm().clamp(min=1e-30)),
    )


def stored(
    model: Any,
    key: str,
    layer: Any,
    weight: Tensor,
    recipe: Recipe,
    dtype: torch.dtype,
    device: str | None = None,
) -> Iterator[tuple[str, ServedLinear]]:
    """:func:`served_weight` of the parameter ``key``, by a checkpoint's names: of experts in one parameter each expert's, gate and up apart."""
    check_experts(model, key, weight, layer, recipe)
    if weight.dim() == 2:
        (name,) = checkpoint_form(model, {key: weight.detach()})
        yield name, served_weight(key.removesuffix(".weight"), layer, weight, recipe, dtype, device)
        return
    experts = weight if isinstance(weight, FrozenFP8Weight) else whole(weight)
    each = [served_weight(key, layer, experts[e], recipe, dtype, device) for e in range(len(experts))]
    codes = checkpoint_form(model, {key: torch.stack([one.weight for one in each])})
    block = getattr(recipe.scaling("w", 1), "block", None)
    rows = [row_scales(one.weight_scale, getattr(weight, "block", block), weight.shape[1]) for one in each]
    for name, scale in checkpoint_form(model, {key: torch.stack(rows)}).items():
        size = block[0] if block else 1 if recipe.by_row else len(scale)
        grid = scale[::size].clone()
        if not torch.equal(row_scales(grid, (size, 1), len(scale)).float(), scale.float()):
            raise _in_two(key, size)
        grid = grid if block or recipe.by_row else grid.view(1)
        worst = max(one.rounding for one in each)
        yield (
            name,
            dataclasses.replace(each[0], weight=codes[name].clone(), weight_scale=grid, rounding=worst),
        )
