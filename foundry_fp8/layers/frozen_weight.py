"""A weight that does not train, kept in FP8 alone: one byte an element in place of two or four.

It is what its recipe would make of the weight in every forward, once and for all. With scales that are powers of two FP8 values are quantised
to themselves, so that an FP8 layer computes with it, bit for bit, what it computes with the weight itself. Everything else (evaluation in
high precision, adapters that are merged, checkpoints) sees the rounded weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from foundry_fp8.numerics.quantize import (
    Quantized,
    amax_of,
    quantize_block,
    quantize_constant,
    quantize_mx,
    quantize_tensor,
    scale_from_amax,
)
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, MXFP8Scaling, Recipe, UnitScaling

__all__ = ["FrozenFP8Weight", "exact_for", "in_high_precision", "keep_in_fp8"]

aten = torch.ops.aten


def exact_for(recipe: Recipe) -> bool:
    """Whether what ``recipe`` makes of a weight is quantised to itself: its scales are powers of two, of the weight alone."""
    return isinstance(recipe, MXFP8Scaling | UnitScaling) or getattr(recipe, "power_2_scales", False)


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


class FrozenFP8Weight(Tensor):
    """Looks like a weight in high precision, which it is again in whatever reads it; what is written to it is quantised.

    Attributes:
        codes: ``[out_features, in_features]``, FP8.
        scale: float32, 0-d or one a block: what ``codes`` are multiplied with; NaN where a block held an Inf.
        block: Rows and columns that share a scale; ``None`` for one scale.
        recipe: Whose quantisation it is.
    """

    codes: Tensor
    scale: Tensor
    block: tuple[int, int] | None
    recipe: Recipe

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, codes: Tensor, scale: Tensor, block: tuple[int, int] | None, recipe: Recipe, dtype: torch.dtype
    ) -> FrozenFP8Weight:
        """An hp tensor of ``dtype`` to who looks."""
        made: FrozenFP8Weight = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=dtype, device=codes.device
        )
        return made

    def __init__(
        self, codes: Tensor, scale: Tensor, block: tuple[int, int] | None, recipe: Recipe, dtype: torch.dtype
    ) -> None:
        self.codes, self.scale, self.block, self.recipe = codes, scale, block, recipe

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FrozenFP8Weight(shape={tuple(self.shape)}, dtype={self.dtype}, recipe={self.recipe.name})"

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The values: exact in float32 and bfloat16, which have room for a code and a power of two."""
        within = torch.float32 if dtype == torch.float16 else dtype
        per_block = Quantized(self.codes, self.scale, self.block, self.recipe.format("w"), self.scale)
        return (self.codes.to(within) * per_block.expanded(self.scale.to(within))).to(dtype)

    @property
    def data(self) -> Tensor:
        """As of any tensor: without autograd's notes, with the same memory."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.detach().copy_(value)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.block, self.recipe, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], meta: Any, size: Any, stride: Any
    ) -> FrozenFP8Weight:
        return cls(inner["codes"], inner["scale"], *meta)

    def _with(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> FrozenFP8Weight:
        return FrozenFP8Weight(codes, scale, self.block, self.recipe, dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        one = args[0] if args else None
        if isinstance(one, FrozenFP8Weight):
            if func is aten.detach.default:
                return one._with(one.codes, one.scale, one.dtype)
            if func is aten.clone.default:
                return one._with(one.codes.clone(), one.scale.clone(), one.dtype)
            if func is aten._to_copy.default:
                dtype, to = kwargs.get("dtype") or one.dtype, {"device": kwargs.get("device")}
                if dtype.is_floating_point and not kwargs.get("layout"):
                    return one._with(one.codes.to(**to, copy=True), one.scale.to(**to, copy=True), dtype)
            if func is aten.copy_.default:
                one._write(args[1])
                return one
        plain_args, plain_kwargs = tree_map_only(
            FrozenFP8Weight, lambda x: x.unpacked(x.dtype), (args, kwargs)
        )
        out = func(*plain_args, **plain_kwargs)
        if isinstance(one, FrozenFP8Weight) and func._schema.is_mutable:
            one._write(plain_args[0])
            return one
        return out

    def _write(self, value: Tensor) -> None:
        if isinstance(value, FrozenFP8Weight):
            value = value.unpacked(value.dtype)
        found = _quantize(value.to(self.device).expand(self.shape), self.recipe)
        self.codes.copy_(found.data)
        self.scale.copy_(found.gemm_scale)


def _quantize(weight: Tensor, recipe: Recipe) -> Quantized:
    fmt = recipe.format("w")
    match recipe:
        case CurrentScaling():
            amax = amax_of(weight)
            return quantize_tensor(weight, scale_from_amax(amax, fmt, power_2=True), fmt, amax)
        case BlockScaling():
            return quantize_block(weight, (recipe.block_size,) * 2, fmt, power_2=True)
        case MXFP8Scaling():
            return quantize_mx(weight, (1, recipe.block_size), fmt)
        case UnitScaling():
            return quantize_constant(weight, recipe.scale("w"), fmt)
    raise TypeError(f"the recipe {recipe.name} has no scales of a weight alone")
