"""One converted linear as a server multiplies with it: FP8 weight, its scale, and the scale of its input."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.compat.checkpoint_form import checkpoint_form
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.dtensor import whole
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight, recipe_of, row_scales
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from foundry_fp8.layers.grouped_linear import FP8GroupedLinear
from foundry_fp8.layers.linear import FP8Linear, FP8TransposedLinear
from foundry_fp8.numerics.formats import E4M3, cast
from foundry_fp8.numerics.nvfp4 import BLOCK, nvfp4_scales, pack_codes
from foundry_fp8.numerics.operands import quantize
from foundry_fp8.numerics.recipes import Recipe

__all__ = [
    "FUSED", "ServedLinear", "check_experts", "check_recipe", "fused_amaxes", "recipe_run_by", "served_weight",
    "stored", "stored_block",
]  # fmt: skip

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Linears of one module that vLLM runs as one, all in FP8 or none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedLinear:
    """``y = (cast(x / input_scale) @ weight.T) * input_scale * weight_scale``, summed in float32.

    Attributes:
        weight: ``[out_features, in_features]`` float8_e4m3fn.
        weight_scale: float32, ``[1]``, of rows ``[out_features, 1]`` or a block each (E8M0 for mxfp8): the weight's scale_inv, and what the
            layer multiplies its output by. For nvfp4 E4M3, one for 16 of a row.
        input_scale: ``[1]`` float32: x's scale_inv; ``None``: the server takes it from each input's amax, or leaves the input as it is (nvfp4).
        rounding: The quantised weight's distance from the weight, as a share of its norm.
        global_scale: ``[1]`` float32, for nvfp4: what ``weight_scale`` is divided by.
        moved: The quantised weight's distance from what training multiplied, as a share of its norm.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    rounding: float
    global_scale: Tensor | None = None
    moved: float = 0.0

    def tensors(self, layout: str) -> dict[str, Tensor]:
        """What a checkpoint holds of it, by the last part of the names there."""
        if self.global_scale is not None:
            packed = {"weight_packed": pack_codes(self.weight), "weight_scale": self.weight_scale}
            return {**packed, "weight_global_scale": self.global_scale}
        found = {
            "weight": self.weight,
            "weight_scale_inv" if layout == "fp8" else "weight_scale": self.weight_scale,
        }
        return found if self.input_scale is None else {**found, "input_scale": self.input_scale}


def check_recipe(recipe: Recipe, layout: str) -> None:
    """Whether ``layout`` can say what ``recipe`` does.

    Raises:
        ConfigError: It cannot.
    """
    kinds = {"fp8": ("block", "mx"), "compressed-tensors": ("tensor", "row", "constant", "block", "nvfp4")}
    if recipe.kind not in kinds[layout]:
        (other,) = kinds.keys() - {layout}
        raise ConfigError(
            f"export: the layout {layout} has no scales as those of {recipe.name}. --layout {other} (layout={other!r}) has."
        )


def stored_block(recipe: Recipe) -> tuple[int, int] | None:
    """Rows and columns of a weight that share a scale in a checkpoint; ``None`` for rows and tensors."""
    return (1, BLOCK) if recipe.kind == "nvfp4" else getattr(recipe.scaling("w", 1), "block", None)


def check_experts(model: Any, key: str, weight: Tensor, layer: Any, recipe: Recipe) -> None:
    """Raise :class:`ConfigError` where a checkpoint has no place for ``weight``, if it is one parameter of experts; before any work."""
    if weight.dim() < 3 and not isinstance(layer, FP8GroupedLinear):
        return
    (part, *_) = checkpoint_form(
        model, {key: torch.empty(weight.shape, dtype=weight.dtype, device="meta")}
    ).values()
    block = stored_block(recipe)
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


def fused_amaxes(owners: Mapping[str, Any]) -> dict[str, Tensor]:
    """By name, the amax that sets NVFP4's global scale of each linear that runs it: the largest of those that vLLM runs as one.

    vLLM has one global scale for them: the largest, with which it would serve a weight of a larger amax too small.

    Args:
        owners: Modules by clean names; sharded ones are reduced in a collective.
    """
    own = {
        name: whole(layer.weight.detach().abs().amax())
        for name, layer in owners.items()
        if isinstance(layer, FP8Linear)
        and (recipe := recipe_run_by(layer, layer.weight))
        and recipe.kind == "nvfp4"
    }
    found = {}
    for name in own:
        parent, dot, leaf = name.rpartition(".")
        group = next((group for group in FUSED if leaf in group), (leaf,))
        parts = [own[part] for part in (f"{parent}{dot}{part}" for part in group) if part in own]
        found[name] = torch.stack(parts).amax()
    return found


def served_weight(
    name: str,
    layer: Any,
    weight: Tensor,
    recipe: Recipe,
    dtype: torch.dtype,
    device: str | None = None,
    amax: Tensor | None = None,
) -> ServedLinear:
    """What ``layer`` multiplies by in its forward, for a server: of ``weight``, its own or that of one of its experts.

    The weight is rounded as in training: to ``dtype``, what the forward computes in, then to E4M3. ``unit``: constant scales, and
    the output multiplier becomes the weight's. ``delayed``: the scales of the next forward. ``current``: the weight's amax, and
    the input's as it comes. ``nvfp4``: the codes, and the blocks' scales, rounded once more where ``amax`` (:func:`fused_amaxes`) is not
    the weight's own. It lies where the weight does, unless ``device`` says otherwise.

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
    trained = restored = quantized.dequantize()
    weight_scale = torch.atleast_1d(quantized.scale_inv * layer.output_multiplier).to(scale_dtype)
    global_scale = None
    if recipe.kind == "nvfp4":
        grid, encode = nvfp4_scales(quantized.amax)
        shared = encode if amax is None else nvfp4_scales(amax.to(weight).float())[1]
        grid = cast(grid.float() * (shared / encode), E4M3)
        restored = quantized.data.float() * quantized.expanded(grid.float() * shared.reciprocal())
        weight_scale = row_scales(grid, quantized.block, len(weight))
        global_scale = (shared / layer.output_multiplier).view(1)
    norm = weight.float().norm().clamp(min=1e-30)
    return ServedLinear(
        weight=quantized.data,
        weight_scale=weight_scale,
        input_scale=input_scale,
        rounding=float((restored - weight.float()).norm() / norm),
        global_scale=global_scale,
        moved=float((restored - trained).norm() / norm),
    )


def stored(
    model: Any,
    key: str,
    layer: Any,
    weight: Tensor,
    recipe: Recipe,
    dtype: torch.dtype,
    device: str | None = None,
    amax: Tensor | None = None,
) -> Iterator[tuple[str, ServedLinear]]:
    """:func:`served_weight` of the parameter ``key``, by a checkpoint's names: of experts in one parameter each expert's, gate and up apart."""
    check_experts(model, key, weight, layer, recipe)
    if weight.dim() == 2:
        (name,), linear = checkpoint_form(model, {key: weight.detach()}), key.removesuffix(".weight")
        yield name, served_weight(linear, layer, weight, recipe, dtype, device, amax)
        return
    experts = weight if isinstance(weight, FrozenFP8Weight) else whole(weight)
    each = [served_weight(key, layer, experts[e], recipe, dtype, device) for e in range(len(experts))]
    codes = checkpoint_form(model, {key: torch.stack([one.weight for one in each])})
    block = stored_block(recipe)
    rows = [row_scales(one.weight_scale, getattr(weight, "block", block), weight.shape[1]) for one in each]
    wide = [one.global_scale.expand(len(one.weight), 1) for one in each if one.global_scale is not None]
    shared = checkpoint_form(model, {key: torch.stack(wide)}) if wide else {}
    for name, scale in checkpoint_form(model, {key: torch.stack(rows)}).items():
        size = block[0] if block else 1 if recipe.by_row else len(scale)
        grid = scale[::size].clone()
        if not torch.equal(row_scales(grid, (size, 1), len(scale)).float(), scale.float()):
            raise _in_two(key, size)
        grid = grid if block or recipe.by_row else grid.view(1)
        worst = max(one.rounding for one in each)
        found = {"weight": codes[name].clone(), "weight_scale": grid, "rounding": worst}
        of_tensor = shared[name][0].clone() if shared else None
        yield name, dataclasses.replace(each[0], **found, global_scale=of_tensor)  # type: ignore[arg-type]
