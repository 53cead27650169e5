"""Which weights of converted linears train nothing and are kept in FP8 alone: under LoRA the base's."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from foundry_fp8.compat.wrapper_tensor import save_plain
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight, exact_for, keep_in_fp8
from foundry_fp8.layers.gemm_layer import configured_recipes
from foundry_fp8.layers.linear import FP8Linear, FP8TransposedLinear

__all__ = ["frozen_linears", "keep_frozen_in_fp8", "plan_frozen", "send_frozen"]


def frozen_linears(model: nn.Module, converted: Mapping[str, FP8Linear]) -> dict[str, FP8Linear]:
    """Of the converted linears those whose weight can be kept in FP8 alone: it does not train, and no other module holds it."""
    holders = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    return {
        name: linear
        for name, linear in converted.items()
        if not isinstance(linear, FP8TransposedLinear)
        and isinstance(linear.weight, nn.Parameter)
        and not linear.weight.requires_grad
        and not isinstance(linear.weight, FrozenFP8Weight)
        and holders[id(linear.weight)] <= 1
    }


def plan_frozen(model: nn.Module, converted: Mapping[str, FP8Linear], key: str) -> dict[str, FP8Linear]:
    """:func:`frozen_linears`, if this run can keep them so.

    Raises:
        ConfigError: A recipe's scales are no powers of two, or nothing is frozen.
    """
    frozen = frozen_linears(model, converted)
    if not frozen and not any(isinstance(linear.weight, FrozenFP8Weight) for linear in converted.values()):
        raise ConfigError(
            f"{key}: fp8, but every converted linear's weight trains (or is shared). It is for LoRA and other runs with a frozen "
            "base: freeze it before the trainer starts, or remove the option."
        )
    for recipe in configured_recipes(frozen.values()):
        if not exact_for(recipe):
            raise ConfigError(
                f"{key}: fp8 needs scales that are powers of two, and not of rows, by which FP8 values are quantised to themselves; those of "
                f"{recipe.name} are not. Set recipe: {{name: current, power_2_scales: true}}, block or mxfp8."
            )
    return frozen


def keep_frozen_in_fp8(frozen: Mapping[str, FP8Linear], key: str, undo: list[Callable[[], Any]]) -> None:
    """Quantise them, for good, and add to ``undo`` what gives those back that are not on a GPU.

    Raises:
        ConfigError: Something else holds on to a weight's memory.
    """
    for name, linear in frozen.items():
        weight = linear.get_parameter("weight")
        assert linear.configured_recipe is not None
        try:
            before = keep_in_fp8(weight, linear.configured_recipe)
        except RuntimeError as error:
            raise ConfigError(
                f"{key}: the weight of {name} cannot be replaced, as something else holds it ({error})."
            ) from error
        if not weight.is_cuda:  # a GPU has no room for both
            undo.append(functools.partial(torch.utils.swap_tensors, weight, before))
        del before
        save_plain(linear)


def send_frozen(model: nn.Module) -> None:
    """Rank 0's to the others, as DDP does with all it knows. A collective of all ranks; every rank holds the same layers."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for parameter in model.parameters():
        if isinstance(parameter, FrozenFP8Weight):
            for part in (parameter.codes, parameter.scale):
                dist.broadcast(part.view(-1).view(torch.uint8), 0)
