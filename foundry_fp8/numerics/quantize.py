"""The reference: quantise and dequantise at every granularity, in plain torch, exact on any device.

Scales follow Transformer Engine's kernels bit for bit (``recipe_common.cuh``: ``compute_scale_from_amax``; E8M0 as in
``util/ptx.cuh``). Every other implementation in this package (the emulated backend's fast path, the Triton kernels) is
tested for equality with this file.

One deliberate difference stands beside the bytes, not in them: TE's cast turns Inf into the format's maximum, and with it
hides an overflow from gradient clipping. :attr:`Quantized.gemm_scale` is NaN wherever the amax was Inf, so that what is
computed from such a tensor is visibly not finite.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from foundry_fp8.numerics.formats import Float8Format, cast, e8m0_decode, e8m0_round_up

__all__ = [
    "FLOAT32_MAX", "Quantized", "amax_of", "block_amax", "quantize_block", "quantize_constant", "quantize_mx",
    "quantize_rows", "quantize_tensor", "scale_from_amax", "with_amax",
]  # fmt: skip

FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclasses.dataclass(frozen=True)
class Quantized:
    """An FP8 tensor with its scales.

    Attributes:
        data: ``[R, C]``, FP8.
        scale_inv: What to multiply with to leave FP8. float32, ``[]`` for a tensorwise scale, otherwise one entry a
            block: ``[ceil(R / block[0]), ceil(C / block[1])]``.
        block: Rows and columns that share a scale; ``None`` for a tensorwise scale.
        fmt: The number format.
        amax: float32, the shape of ``scale_inv``: max |x| over the block, NaN elements ignored.
        nan_free: Known to hold no NaN, so that a reader of the bytes need not look.
    """

    data: Tensor
    scale_inv: Tensor
    block: tuple[int, int] | None
    fmt: Float8Format
    amax: Tensor
    nan_free: bool = False

    @property
    def gemm_scale(self) -> Tensor:
        """``scale_inv``, NaN where the block held an Inf: what a GEMM multiplies with, so that Inf stays visible."""
        return self.scale_inv.masked_fill(self.amax == torch.inf, torch.nan)

    def dequantize(self) -> Tensor:
        """float32 ``[R, C]``: ``data * gemm_scale``."""
        return self.data.float() * self.expanded(self.gemm_scale)

    def t(self) -> Quantized:
        """The transpose: views of the same bytes, scales and amaxes."""
        if self.block is None:
            return dataclasses.replace(self, data=self.data.t())
        return dataclasses.replace(
            self, data=self.data.t(), scale_inv=self.scale_inv.t(), block=self.block[::-1], amax=self.amax.t()
        )

    def expanded(self, per_block: Tensor) -> Tensor:
        """``per_block`` (the shape of ``scale_inv``) repeated so that it broadcasts against ``data``."""
        if self.block is None:
            return per_block
        rows, columns = self.data.shape
        return per_block.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[
            :, :columns
        ]


def amax_of(x: Tensor) -> Tensor:
    """Max |x| in float32, 0-d. NaN elements are ignored, as by the GPU's ``fmaxf``; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf).amax()


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Max |x| of each block, float32 ``[ceil(R / block[0]), ceil(C / block[1])]``; elements past the edge count as 0."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(
        x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf), (0, -columns % block[1], 0, -rows % block[0])
    )
    tiled = padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    return tiled.amax(dim=(1, 3))


def scale_from_amax(
    amax: Tensor, fmt: Float8Format, *, power_2: bool = False, value_for_inf: float = FLOAT32_MAX
) -> Tensor:
    """The scale that maps ``amax`` to the format's maximum.

    Args:
        amax: Any shape, float32, not negative.
        fmt: The number format.
        power_2: Round the scale down to a power of two.
        value_for_inf: What an overflowing quotient becomes (the block recipe uses the input dtype's maximum).

    Returns:
        float32, the shape of ``amax``. 1 where amax is 0, Inf or NaN.

    Source:
        Transformer Engine, ``common/recipe/recipe_common.cuh``, ``compute_scale_from_amax``.
    """
    usable = (amax > 0) & (amax < torch.inf)
    # Not `fmt.max / amax`: torch computes that as a reciprocal and a product, which rounds twice.
    largest = torch.full_like(amax, fmt.max)
    scale = torch.div(largest, torch.where(usable, amax, largest))
    scale = scale.masked_fill(scale == torch.inf, value_for_inf)
    if power_2:
        # Keep sign and exponent: floor to 2**k.
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return scale


def quantize_tensor(x: Tensor, scale: Tensor, fmt: Float8Format, amax: Tensor | None = None) -> Quantized:
    """Quantise with one given scale (delayed), or one computed by :func:`scale_from_amax` (current).

    Args:
        x: ``[R, C]``, hp.
        scale: 0-d float32.
        fmt: The number format.
        amax: :func:`amax_of` ``(x)`` where the caller has it already.
    """
    amax = amax_of(x) if amax is None else amax
    return Quantized(cast(x.float() * scale, fmt), scale.reciprocal(), None, fmt, amax)


def quantize_constant(x: Tensor, scale: float, fmt: Float8Format) -> Quantized:
    """Clip and cast with a constant scale (unit). Inf becomes NaN, since no amax shows it.

    Args:
        x: ``[R, C]``, hp.
        scale: What to multiply by, a power of two.
        fmt: The number format.

    Returns:
        Its ``amax`` is 0: nobody measured it.
    """
    wide = x.float()
    data = cast(torch.where(torch.isinf(wide), torch.nan, wide * scale), fmt)
    return Quantized(data, wide.new_full((), 1 / scale), None, fmt, wide.new_zeros(()))


def with_amax(q: Quantized, x: Tensor) -> Quantized:
    """What :func:`quantize_constant` made of ``x``, with the amax that it left out; for monitors."""
    return dataclasses.replace(q, amax=amax_of(x))


def quantize_block(
    x: Tensor, block: tuple[int, int], fmt: Float8Format, *, power_2: bool = True
) -> Quantized:
    """Quantise with one float32 scale a block: ``(1, 128)``, ``(128, 1)`` or ``(128, 128)``. Edge blocks may be ragged.

    Args:
        x: ``[R, C]``, hp.
        block: Rows and columns that share a scale.
        fmt: The number format.
        power_2: Scales are powers of two.
    """
    value_for_inf = torch.finfo(x.dtype).max
    amax = block_amax(x, block)
    scale = scale_from_amax(amax, fmt, power_2=power_2, value_for_inf=value_for_inf)
    empty = Quantized(x, scale, block, fmt, amax)
    return Quantized(cast(x.float() * empty.expanded(scale), fmt), scale.reciprocal(), block, fmt, amax)


def quantize_rows(x: Tensor, fmt: Float8Format, *, along: int, power_2: bool = False) -> Quantized:
    """Quantise with one scale for all elements along a dimension: ``current`` with ``granularity: row``.

    Args:
        x: ``[R, C]``, hp.
        fmt: The number format.
        along: 1: a scale a row, ``scale_inv`` ``[R, 1]``; 0: a scale a column, ``[1, C]``.
        power_2: Scales are powers of two.
    """
    amax = x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(along, keepdim=True)
    scale = scale_from_amax(amax, fmt, power_2=power_2)
    block = (1, x.shape[1]) if along == 1 else (x.shape[0], 1)
    return Quantized(cast(x.float() * scale, fmt), scale.reciprocal(), block, fmt, amax)


def quantize_mx(x: Tensor, block: tuple[int, int], fmt: Float8Format) -> Quantized:
    """Quantise with one E8M0 scale a block, ``(1, 32)`` along rows or ``(32, 1)`` along columns.

    The scale exponent is ``ceil(log2(amax / max))``, so that no finite element saturates. A block with an Inf gets
    the largest scale, which flushes its finite elements to zero.

    Args:
        x: ``[R, C]``, hp.
        block: Rows and columns that share a scale.
        fmt: The number format.
    """
    amax = block_amax(x, block)
    code = e8m0_round_up(amax * torch.tensor(1.0 / fmt.max, dtype=torch.float32, device=x.device))
    scale_inv = e8m0_decode(code)
    scale = e8m0_decode((254 - code.to(torch.int16)).to(torch.uint8))  # exactly 1 / scale_inv
    empty = Quantized(x, scale, block, fmt, amax)
    return Quantized(cast(x.float() * empty.expanded(scale), fmt), scale_inv, block, fmt, amax)
