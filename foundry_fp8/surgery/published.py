"""Weights that a checkpoint published in FP8, with the scales beside them, as weights that every layer reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.ddp_left_out import leave_out_of_ddp
from foundry_fp8.compat.wrapper_tensor import save_plain
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight, quantized_weight, recipe_of, scaling_of
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.blocks import transformer_blocks
from foundry_fp8.model_structure.wrappers import replace_module
from foundry_fp8.numerics.recipes import Recipe
from foundry_fp8.numerics.scalings import Blocks

__all__ = [
    "SCALES", "adopted", "as_if_published", "check_codes_stay", "leave_frozen_out_of_ddp", "published_weight",
    "share_scalings",
]  # fmt: skip

SCALES = ("weight_scale_inv", "weight_scale")
"""What the codes are multiplied by, as FineGrainedFP8 and compressed-tensors call it."""


def published_weight(
    name: str, codes: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> FrozenFP8Weight:
    """Codes and scales as they were published, in a weight that looks like one of ``dtype``.

    Args:
        name: Of the weight, for messages.
        codes: ``[..., out_features, in_features]``, float8_e4m3fn.
        scale: What they are multiplied by: one; one a row; or ``[..., ceil(out / block[0]), ceil(in / block[1])]``. uint8: E8M0.
        block: Rows and columns that share a scale, where they are blocks; the last may be short.
        dtype: Of the weight in high precision.

    Raises:
        ConfigError: Another format, or scales that do not fit.
    """
    rows, columns = codes.shape[-2:]
    scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    if block is None and (scale.numel() > 1 or codes.dim() > 2):
        block, scale = (1, columns), scale.reshape(*codes.shape[:-2], -1, 1)
    scale = scale if block else scale.reshape(())
    grid = [*codes.shape[:-2], -(-rows // block[0]), -(-columns // block[1])] if block else []
    if codes.dtype != torch.float8_e4m3fn or not scale.is_floating_point() or [*scale.shape] != grid:
        raise ConfigError(
            f"{name}: scales {[*scale.shape]} {scale.dtype} do not fit a weight {[*codes.shape]} {codes.dtype} in blocks of {block or 'all of it'}: "
            f"float8_e4m3fn with {grid} would. Correct weight_block_size in config.json's quantization_config, or dequantise the checkpoint."
        )
    weight = FrozenFP8Weight(codes, scale, block, scaling_of(scale, block, columns), dtype)
    if not scale.is_meta:
        _check_values(name, weight)
    return weight


def _check_values(name: str, weight: FrozenFP8Weight) -> None:
    scale = weight.scale.float()
    if not (scale.isfinite() & (scale >= 0)).all():
        wrong = "not finite, or negative"
    elif (scale == 0).any() and ((weight.unpacked(torch.float32) == 0) & (weight.codes.float() != 0)).any():
        wrong = "0 where codes are not"
    else:
        return
    raise ConfigError(
        f"{name}: its scale is {wrong}, so that its values are lost. torch's consolidation of shards writes 0 for a scale without "
        "dimensions: take the files from before it, or download the checkpoint again."
    )


@contextmanager
def adopted(model: nn.Module) -> Iterator[None]:
    """Put an ``nn.Linear`` in the place of every linear of transformers' FineGrainedFP8 or of compressed-tensors.

    A weight that requires a gradient becomes a plain one of the values, in the model's dtype; a frozen one keeps its codes and scales.
    """
    linears = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear))
    found = {name: linear for name, linear in linears if _scale_of(name, linear) is not None}
    scaled = {id(p) for module in found.values() for p in module.parameters(recurse=False)}
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point() and id(p) not in scaled]
    for name, p in model.named_parameters():
        if p.requires_grad and p.is_floating_point() and p.dtype.itemsize == 1 and id(p) not in scaled:
            raise ConfigError(f"{name} trains in {p.dtype}, as PEFT makes an adapter of a base in FP8. Cast it to bfloat16 (its module's .to()), or adapt a model that load_fp8 filled.")  # fmt: skip
    for name, module in found.items():
        replace_module(model, name, _linear_of(name, module, dtypes[0] if dtypes else torch.bfloat16))
    share_scalings(model)
    yield
    leave_frozen_out_of_ddp(model)


def share_scalings(model: nn.Module) -> None:
    """Say of float32 scales that happen to be powers of two, beside others that are not, what is said of the others: one recipe reads all."""
    weights = (
        p for p in model.parameters() if isinstance(p, FrozenFP8Weight) and p.scale.dtype == torch.float32
    )
    kept: list[Any] = [p for p in weights if hasattr(p.scaling, "power_2")]
    if not all(p.scaling.power_2 for p in kept):
        for p in kept:
            p.scaling = dataclasses.replace(p.scaling, power_2=False)


def leave_frozen_out_of_ddp(model: nn.Module) -> None:
    """Have DDP around ``model`` send no weight that is kept in FP8."""
    if names := [name for name, p in model.named_parameters() if isinstance(p, FrozenFP8Weight)]:
        leave_out_of_ddp(model, names)


def as_if_published(model: nn.Module, recipes: Sequence[Recipe]) -> None:
    """Have the frozen linears of blocks keep codes, as loading a published checkpoint does, with scales that the first recipe reads: for plans."""
    asked = [recipe.scaling("w", 1) for recipe in recipes[:1]]
    scaling = asked[0] if asked and recipe_of(asked[0]) else Blocks((128, 128), power_2=False)
    for module in (module for _, block in transformer_blocks(model) for module in block.modules()):
        if isinstance(module, nn.Linear) and not (weight := module.weight).requires_grad:
            module.weight = nn.Parameter(quantized_weight(weight, scaling), requires_grad=False)
            save_plain(module)


def _scale_of(name: str, module: Any) -> Tensor | None:
    weight = module._parameters.get("weight")
    scale = next((s for name in SCALES if isinstance(s := getattr(module, name, None), Tensor)), None)
    if "weight_packed" in module._parameters:
        raise ConfigError(f"{name} holds packed codes (NVFP4 or integers), which no layer here multiplies by. Load the model dequantised (CompressedTensorsConfig(run_compressed=False)).")  # fmt: skip
    if weight is None or scale is None or weight.element_size() == 1:
        return None if weight is None else scale
    if type(module).__name__ == "FP8Linear" or getattr(module, "quantization_status", "") == "compressed":
        raise ConfigError(f"{name}: its FP8 codes were cast to {weight.dtype}, as .to(dtype) and .float() of a model do. Load it again, and cast nothing.")  # fmt: skip
    return None


def _linear_of(name: str, module: Any, dtype: torch.dtype) -> nn.Linear:
    if type(module).__name__ == "FP8GroupedLinear":
        raise ConfigError(f"{name}: no FP8 layer computes what transformers' FP8GroupedLinear does. Load it with dequantize=True.")  # fmt: skip
    scheme = getattr(getattr(module, "quantization_scheme", None), "weights", None)
    block = getattr(module, "block_size", None) or getattr(scheme, "block_structure", None)
    scale: Any = _scale_of(name, module)
    weight = published_weight(
        name, module.weight.detach(), scale.detach(), tuple(block) if block else None, dtype
    )
    linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta", dtype=dtype)
    linear.bias, linear.training = module.bias, module.training
    trains = module.weight.requires_grad
    linear.weight = nn.Parameter(weight.unpacked(dtype) if trains else weight, requires_grad=trains)
    save_plain(linear)
    return linear


def check_codes_stay(converted: Mapping[str, FP8Linear], key: str) -> None:
    """Raise :class:`ConfigError` where a recipe would round a published weight a second time."""
    for name, linear in converted.items():
        weight = linear.weight
        if not isinstance(weight, FrozenFP8Weight):
            continue
        fitting = recipe_of(weight.scaling)
        again = (r for r in linear.recipes if r.uses_history or r.scaling("w", 1) != weight.scaling)
        lost = fitting is None or fitting.by_row
        if (recipe := next(again, linear.recipes[0] if lost else None)) is not None:
            fits = "No recipe" if fitting is None or fitting.by_row else f"recipe: {fitting.to_dict()}"
            raise ConfigError(
                f"{key}: the frozen weight of {name} has published codes, with scales by {weight.scaling}, which {recipe.name} would round "
                f"again. {fits} multiplies by them as they are; in high precision ({key}.exclude) a layer reads the same codes; to train "
                "the weights, load them into a model whose parameters require gradients (load_fp8)."
            )
