"""NVFP4: four bits an element (E2M1), an E4M3 scale for 16 of them along what a GEMM contracts, a float32 scale for the tensor.

The rule is that of Transformer Engine's kernels bit for bit, float32 throughout, unless ``NVTE_USE_FAST_MATH`` changes theirs::

    encode = min(6 * 448 / amax of the tensor, largest float32)                    1 if that amax is 0 or Inf
    scale  = E4M3(min(amax of the block * (encode * (1 / 6)), 448))                the product in brackets first; no least scale
    code   = E2M1(clamp(x * min(1 / (scale * (1 / encode)), largest float32), -6, 6))

What leaves FP4 is multiplied by ``scale * (1 / encode)``. A block that holds a NaN or an Inf has NaN there, as E2M1 has neither.

Source:
    NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149); Transformer Engine, ``common/cast/nvfp4/core_nvfp4.cuh``,
    ``common/hadamard_transform``. Random numbers are this package's.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from foundry_fp8.numerics.formats import E4M3, Float8Format, cast
from foundry_fp8.numerics.quantize import FLOAT32_MAX, Quantized
from foundry_fp8.numerics.scalings import Scaling

__all__ = ["BLOCK", "E2M1", "NVFP4Blocks", "hadamard", "nvfp4_scales", "pack_codes", "unpack_codes"]

BLOCK = 16
"""Elements that share a scale, and that a Hadamard transform mixes."""

E2M1 = Float8Format(name="e2m1", dtype=E4M3.dtype, max=6.0, min_normal=1.0, min_subnormal=0.5)
"""0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives: all E4M3's too, in whose bytes an operand has them."""

_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""What Transformer Engine multiplies 16 elements by before it transforms them, in every layer and step."""
_BYTES = (0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C)
"""E4M3's bytes of E2M1's codes 0 to 7; codes 8 to 15 are their negatives."""


@dataclasses.dataclass(frozen=True)
class NVFP4Blocks(Scaling):
    """An E4M3 scale a block, beside one for the tensor.

    Attributes:
        block: Rows and columns that share a scale.
        transforms: Transform columns first (:func:`hadamard`). Both operands of a GEMM are, so that their product stays what it is.
        stochastic: Round at random, without bias, in place of to nearest even.
        number: Of the pass, by which random numbers differ.
    """

    kind = "nvfp4"
    scale_dtype = E4M3.dtype
    block: tuple[int, int]
    transforms: bool = False
    stochastic: bool = False
    number: int = 0

    def of_pass(self, number: int) -> NVFP4Blocks:
        """See :meth:`Scaling.of_pass`."""
        return dataclasses.replace(self, number=number) if self.stochastic else self

    def quantize(self, x: Tensor, fmt: Float8Format, scale: Tensor | None = None) -> Quantized:
        """See :meth:`Scaling.quantize`. A transformed ``x`` has its rows filled up to whole blocks."""
        wide = (hadamard(x) if self.transforms else x).float()
        (rows, columns), (high, broad) = wide.shape, self.block
        if rows % high or columns % broad:
            wide = torch.nn.functional.pad(wide, (0, -columns % broad, 0, -rows % high))
        tiles = wide.unflatten(1, (-1, broad)).unflatten(0, (-1, high))
        amax = tiles.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax((1, 3))
        stored, encode = nvfp4_scales(amax)
        scale_inv = stored.float() * encode.reciprocal()
        factor = scale_inv.reciprocal().clamp_(max=FLOAT32_MAX)
        scaled = (tiles * factor[:, None, :, None]).clamp_(-fmt.max, fmt.max)
        scale_inv = scale_inv.masked_fill(scaled.amax((1, 3)).isnan(), torch.nan)
        scaled = scaled.nan_to_num_(nan=0.0).view(wide.shape)
        noise = uniform(scaled, 2 * self.number + (high == 1)) if self.stochastic else None
        data = cast(round_e2m1(scaled, noise), fmt)[:rows, :columns]
        return Quantized(data, scale_inv, self.block, fmt, amax, nan_free=True)

    def pack(self, q: Quantized) -> tuple[Tensor, Tensor]:
        """4.5 bits an element: two codes a byte, a byte a scale; the tensor's scale is the last four."""
        stored, encode = nvfp4_scales(q.amax)
        stored = stored.view(torch.uint8).masked_fill(q.gemm_scale.isnan(), 0x7F)  # E4M3's NaN
        scales = torch.cat((stored.flatten(), encode.reciprocal().view(1).view(torch.uint8)))
        return pack_codes(q.data), scales

    def unpack(self, data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Scaling.unpack`."""
        codes = unpack_codes(data)
        stored, decode = scale[:-4].view(E4M3.dtype), scale[-4:].clone().view(torch.float32)
        return codes, (stored.float() * decode).view(-1, -(-codes.shape[1] // self.block[1]))


def nvfp4_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks' E4M3 scales from their amaxes, and ``encode``, 0-d float32, of their tensor."""
    largest = amax.max() if amax.numel() else amax.new_zeros(())
    encode = torch.div(torch.full_like(largest, E2M1.max * E4M3.max), largest).clamp_(max=FLOAT32_MAX)
    encode = encode.masked_fill((largest == 0) | (encode == 0), 1.0)
    sixth = torch.full_like(encode, 1 / E2M1.max)
    return cast(amax * (encode * sixth), E4M3), encode


def round_e2m1(x: Tensor, noise: Tensor | None = None) -> Tensor:
    """To E2M1's numbers, float32: to nearest even, or with ``noise`` up with the probability of what is left over.

    Args:
        x: float32, from -6 to 6.
        noise: From 0 to 1, both left out; the shape of ``x``.
    """
    power = (x.view(torch.int32) & 0x7F800000).clamp_(min=127 << 23).view(torch.float32)
    if noise is None:  # to the bits that a sum of that size has left
        return x.add(power, alpha=1.5 * 2**22).sub_(power, alpha=1.5 * 2**22)
    step = power.div_(2)
    return x.div(step).add_(noise).floor_().mul_(step)


def uniform(x: Tensor, key: int) -> Tensor:
    """Random numbers from 0 to 1, both left out: odd multiples of ``2**-21``, to which 24 bits of mantissa add up exactly.

    Each is a hash of the element's place, its own bits and ``key``, the same on any device and whatever else draws numbers. With the
    bits, ranks and experts that count the same passes do not make the same errors.

    Args:
        x: float32.
        key: Another for other numbers.
    """
    place = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    key = (key * 0x9E3779B1 + 2**31) % 2**32 - 2**31
    mixed = _mix_(_mix_(place).bitwise_xor_(x.view(torch.int32)).bitwise_xor_(key))
    return mixed.bitwise_and_(0x1FFFFF).bitwise_or_(1).float().mul_(2.0**-21)


def _mix_(h: Tensor) -> Tensor:
    """A bijection of int32 whose every output bit depends on all input bits (C. Wellons, "lowbias32"), in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        h.bitwise_xor_((h >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(factor)
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))


def hadamard(x: Tensor) -> Tensor:
    """16 rows at a time times signs and the orthogonal Hadamard matrix, in float32; rounded back where ``x`` is bfloat16.

    By sums and differences, which no setting of matrix products changes.

    Args:
        x: ``[R, C]``, hp.

    Returns:
        ``[R', C]``: R rounded up to whole blocks, as if rows of zeros followed.
    """
    signs = torch.tensor(_SIGNS, dtype=torch.float32, device=x.device).view(2, 2, 2, 2, 1)
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, -len(x) % BLOCK))
    mixed: Tensor = padded.unflatten(0, (-1, 2, 2, 2, 2)) * signs
    for bit in range(1, 5):
        first, second = mixed.select(bit, 0), mixed.select(bit, 1)
        difference = first - second
        first.add_(second)
        second.copy_(difference)
    mixed = mixed.flatten(0, 4).div_(4)
    return mixed.to(x.dtype) if x.dtype == torch.bfloat16 else mixed


def pack_codes(data: Tensor) -> Tensor:
    """Two E2M1 numbers of ``data`` (``[R, C]``, in E4M3's bytes) in each byte of uint8 ``[R, C / 2]``, the first in the low half."""
    bits = data.view(torch.uint8)
    order = (bits >> 2) & 0x1F  # 0, 12, 14, 15, 16, 17, 18, 19
    codes = (order.clamp(min=12) - 12) + (order == 12) | (bits >> 4) & 8
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack_codes(packed: Tensor) -> Tensor:
    """What :func:`pack_codes` was given."""
    table = torch.tensor([*_BYTES, *(0x80 | b for b in _BYTES)], dtype=torch.uint8, device=packed.device)
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(1)
    return table.index_select(0, codes.flatten().int()).view(codes.shape).view(E2M1.dtype)
