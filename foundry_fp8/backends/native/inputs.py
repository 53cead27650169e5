"""What a native linear reads of its module before it launches anything."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_fp8.kernels.launch import HP_DTYPES
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.recipes import DelayedScaling

__all__ = ["checked_dtype", "delayed_tensors"]


def checked_dtype(module: FP8Linear, x: Tensor) -> torch.dtype:
    """The dtype in which ``module`` computes on ``x``.

    Raises:
        ValueError: Another number of features: the kernels pad, so a GEMM might not notice.
        RuntimeError: Another device than the weight's.
        TypeError: A dtype that the kernels do not read.
    """
    if x.dim() == 0 or x.shape[-1] != module.in_features:
        raise ValueError(
            f"{module.fqn}: the input is {tuple(x.shape)}; its last dimension must be in_features={module.in_features}."
        )
    if x.device != module.weight.device:
        raise RuntimeError(
            f"{module.fqn}: the input is on {x.device}, the weight on {module.weight.device}. Move one of them."
        )
    dtype = compute_dtype(x)
    if dtype not in HP_DTYPES:
        raise TypeError(f"{module.fqn}: the input is {dtype}; FP8 layers take float32, bfloat16 and float16.")
    return dtype


def delayed_tensors(module: FP8Linear) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The scale of x, w and dy, and where to record their amaxes; ``None`` for recipes other than delayed."""
    if module.slots is None or not isinstance(module.recipe, DelayedScaling):
        return [None] * 3, [None] * 3
    scales: list[Tensor | None] = [slot.scale for slot in module.slots.values()]
    recording = module.recording()
    return scales, [slot.amax if operand in recording else None for operand, slot in module.slots.items()]
