"""Weights that a checkpoint published in FP8, with the scales beside them, as weights that every layer reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.ddp_left_out import leave_out_of_ddp
from foundry_fp8.compat.wrapper_tensor import save_plain
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight, recipe_of, scaling_of
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.wrappers import replace_module

__all__ = ["SCALES", "adopted", "check_codes_stay", "keep_published", "published_weight"]

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
    if codes.dtype != torch.float8_e4m3fn:
        raise ConfigError(
            f"{name}: {codes.dtype} is read by nobody here; float8_e4m3fn is. Dequantise the checkpoint first."
        )
    scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    rows, columns = codes.shape[-2:]
    if scale.numel() == 1 and codes.dim() == 2 and block is None:
        return FrozenFP8Weight(codes, scale.reshape(()), None, scaling_of(scale, None, columns), dtype)
    if block is None:
        block, scale = (1, columns), scale.reshape(*codes.shape[:-2], -1, 1)
    grid = (*codes.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != grid:
        raise ConfigError(
            f"{name}: scales {list(scale.shape)} do not fit a weight {list(codes.shape)} in blocks of {block[0]} x {block[1]}, which has "
            f"{list(grid)}. Correct weight_block_size in config.json's quantization_config."
        )
    return FrozenFP8Weight(codes, scale, block, scaling_of(scale, block, columns), dtype)


def keep_published(module: nn.Module, leaf: str, weight: FrozenFP8Weight) -> None:
    """Make ``module``'s parameter ``leaf`` ``weight``, frozen; it stays the same object.

    Raises:
        ConfigError: Something else holds its memory.
    """
    try:
        torch.utils.swap_tensors(module.get_parameter(leaf), nn.Parameter(weight, requires_grad=False))
    except RuntimeError as error:
        raise ConfigError(
            f"{leaf} of {type(module).__name__} cannot be replaced, as something else holds it ({error})."
        ) from error
    save_plain(module)


@contextmanager
def adopted(model: nn.Module) -> Iterator[None]:
    """Put an ``nn.Linear`` in the place of every linear of transformers' FineGrainedFP8 or of compressed-tensors; an error puts them back.

    A weight that requires a gradient becomes a plain one of the values, in the model's dtype; a frozen one keeps its codes and scales.
    """
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1)
    names = ("weight", "bias", *SCALES)
    dtype = next(
        (p.dtype for n, p in model.named_parameters() if n.rpartition(".")[2] not in names),
        next(dtypes, torch.bfloat16),
    )
    found = [(n, m) for n, m in model.named_modules() if _is_published(m)]
    made: dict[int, nn.Linear] = {}
    try:
        for name, module in found:
            made.setdefault(id(module), _linear_of(name, module, dtype))
            replace_module(model, name, made[id(module)])
        leave_out_of_ddp(model, [n for n, p in model.named_parameters() if isinstance(p, FrozenFP8Weight)])
        yield
    except BaseException:
        for name, module in found:
            replace_module(model, name, module)
        raise


def _is_published(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return (
        isinstance(module, nn.Linear)
        and weight is not None
        and weight.element_size() == 1
        and _scale_of(module) is not None
    )


def _scale_of(module: nn.Module) -> Tensor | None:
    return next((s for name in SCALES if isinstance(s := getattr(module, name, None), Tensor)), None)


def _linear_of(name: str, module: Any, dtype: torch.dtype) -> nn.Linear:
    scale = _scale_of(module)
    assert scale is not None
    if type(module).__name__ == "FP8GroupedLinear":
        raise ConfigError(
            f"{name}: a grouped linear of transformers in FP8 is converted by nobody here. Load it with dequantize=True."
        )
    scheme = getattr(getattr(module, "quantization_scheme", None), "weights", None)
    block = getattr(module, "block_size", None) or getattr(scheme, "block_structure", None)
    dtype = dtype if module.bias is None else module.bias.dtype
    weight = published_weight(
        name, module.weight.detach(), scale.detach(), tuple(block) if block else None, dtype
    )
    linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta", dtype=dtype)
    linear.bias, linear.training = module.bias, module.training
    if module.weight.requires_grad:
        linear.weight = nn.Parameter(weight.unpacked(dtype))
    else:
        keep_published(linear, "weight", weight)
    return linear


def check_codes_stay(converted: Mapping[str, FP8Linear], key: str) -> None:
    """Raise :class:`ConfigError` where a recipe would round a published weight a second time."""
    for name, linear in converted.items():
        weight, recipe = linear.weight, linear.configured_recipe
        if not isinstance(weight, FrozenFP8Weight) or recipe is None:
            continue
        fitting = recipe_of(weight.scaling)
        if (
            fitting is None
            or recipe.uses_history
            or recipe.scaling("w", 1) != weight.scaling
            or recipe.by_row
        ):
            fits = (
                "None is"
                if fitting is None or fitting.by_row
                else f"recipe: {{{', '.join(f'{k}: {v}' for k, v in _short(fitting))}}} is"
            )
            raise ConfigError(
                f"{key}: the frozen weight of {name} has published codes, with scales by {weight.scaling}, which {recipe.name} would round "
                f"again. {fits} the one that multiplies by them; or leave the layer in high precision ({key}.exclude), which reads the same "
                "codes; or load it to train (load_fp8 into a model whose parameters require gradients)."
            )


def _short(recipe: Any) -> list[tuple[str, Any]]:
    plain = type(recipe)().to_dict()
    return [
        (k, str(v).lower() if isinstance(v, bool) else v)
        for k, v in recipe.to_dict().items()
        if k == "name" or plain[k] != v
    ]
