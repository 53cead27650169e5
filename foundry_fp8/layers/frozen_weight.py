"""A weight that does not train, kept in FP8 alone: one byte an element in place of two or four.

It is what its recipe would make of the weight in every forward, once and for all. With scales that are powers of two FP8 values are quantised
to themselves, so that an FP8 layer computes with it, bit for bit, what it computes with the weight itself. Everything else (evaluation in
high precision, adapters that are merged, checkpoints) sees the rounded weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foundry_fp8.compat.wrapper_tensor import WrapperTensor
from foundry_fp8.numerics.operands import quantize
from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["FrozenFP8Weight", "exact_for", "in_dtype", "in_high_precision", "keep_in_fp8"]


def exact_for(recipe: Recipe) -> bool:
    """Whether what ``recipe`` makes of a weight is quantised to itself: its scales are powers of two, of the weight alone."""
    return recipe.scaling("w", 1).keeps_codes and not recipe.uses_history


def keep_in_fp8(weight: nn.Parameter, recipe: Recipe) -> None:
    """Make the frozen ``weight`` (``[out_features, in_features]``, hp) a :class:`FrozenFP8Weight`; it stays the same object.

    Raises:
        RuntimeError: Something holds on to its memory (torch's ``swap_tensors``), so that none would be saved.
    """
    found = _quantize(weight.detach(), recipe)
    kept = FrozenFP8Weight(found.data, found.gemm_scale, found.block, recipe, weight.dtype)
    torch.utils.swap_tensors(weight, nn.Parameter(kept, requires_grad=False))


def in_high_precision(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight`` in ``dtype``, a plain tensor whatever it is kept in; the same one where it is that already."""
    if isinstance(weight, FrozenFP8Weight):
        return weight.unpacked(dtype)
    return weight if weight.dtype == dtype else weight.to(dtype)


class FrozenFP8Weight(WrapperTensor):
    """Looks like a weight in high precision, which it is again in whatever reads it; what is written to it is quantised.

    Attributes:
        codes: ``[out_features, in_features]``, FP8.
        scale: float32, 0-d or one a block: what ``codes`` are multiplied with; NaN where a block held an Inf.
        block: Rows and columns that share a scale; ``None`` for one scale.
        recipe: Whose quantisation it is.
    """

    parts = ("codes", "scale")
    codes: Tensor
    scale: Tensor
    block: tuple[int, int] | None
    recipe: Recipe

    def __new__(
        cls, codes: Tensor, scale: Tensor, block: tuple[int, int] | None, recipe: Recipe, dtype: torch.dtype
    ) -> FrozenFP8Weight:
        """An hp tensor of ``dtype`` to who looks."""
        made: FrozenFP8Weight = cls.wrapper_like(codes, dtype)
        return made

    def __init__(
        self, codes: Tensor, scale: Tensor, block: tuple[int, int] | None, recipe: Recipe, dtype: torch.dtype
    ) -> None:
        self.codes, self.scale, self.block, self.recipe = codes, scale, block, recipe

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FrozenFP8Weight(shape={tuple(self.shape)}, dtype={self.dtype}, recipe={self.recipe.name})"

    def meta(self) -> tuple[tuple[int, int] | None, Recipe]:
        """Block and recipe."""
        return self.block, self.recipe

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The values: exact in float32 and bfloat16, which have room for a code and a power of two."""
        within = torch.float32 if dtype == torch.float16 else dtype
        per_block = Quantized(self.codes, self.scale, self.block, self.recipe.format("w"), self.scale)
        return (self.codes.to(within) * per_block.expanded(self.scale.to(within))).to(dtype)

    def write(self, value: Tensor) -> None:
        """Quantise ``value``, hp, in place of what is there."""
        found = _quantize(value, self.recipe)
        self.codes.copy_(found.data)
        self.scale.copy_(found.gemm_scale)


def _quantize(weight: Tensor, recipe: Recipe) -> Quantized:
    if not exact_for(recipe):
        raise TypeError(f"the recipe {recipe.name} has no scales of a weight alone that are powers of two")
    return quantize(weight, "w", recipe)


def in_dtype(out: Tensor, dtype: torch.dtype) -> Tensor:
    """``out.to(dtype)``, which costs the host something where it changes nothing too; a weight kept in FP8 as a plain tensor."""
    return out if out.dtype == dtype and type(out) is not FrozenFP8Weight else in_high_precision(out, dtype)
