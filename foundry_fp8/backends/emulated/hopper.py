"""How Hopper's FP8 tensor cores add products up, bit for bit.

One instruction (``wgmma``, 32 elements along K) adds 32 products to an accumulator:

1. each of the 33 terms has an exponent: that of a product is the sum of its factors' (a subnormal counts as the least
   normal), that of the accumulator its own;
2. every term is truncated, toward zero, to a multiple of ``2 ** (e - 13)``, where e is the largest of these exponents;
3. what is left is added exactly, and truncated toward zero to 13 bits of mantissa: the new accumulator.

Fast accumulation repeats this along all of K. As the accumulator grows, so does its last bit; truncating each term below
that bit loses toward zero, so sums of one sign are too small. Precise accumulation ("promotion") starts a new accumulator
every 128 elements and adds the finished one to a float32 sum outside of the tensor core. Block scales are applied there,
so their GEMMs are always precise.

Not modelled: split-K (a library sums pieces of K separately), and where cuBLAS promotes, which is not published. 128 is
CUTLASS's default and what DeepSeek-V3 found to be enough.

Source:
    MMA-Sim, arXiv:2511.10909, algorithm "T-FDPA" with the parameters of Hopper's FP8 ``wgmma`` (32 products, 13 bits,
    result truncated to E8M13), which its authors found equal to the hardware bit for bit. DeepSeek-V3,
    arXiv:2412.19437, section 3.3.2, for the promotion.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_fp8.backends.emulated.dense import dense_values
from foundry_fp8.numerics.quantize import Quantized

__all__ = ["PROMOTION", "hopper_mm"]

STEP = 32
"""Elements along K that one instruction takes."""
BITS = 13  # mantissa bits of the accumulator
PROMOTION = 128
"""Elements along K between two promotions."""
_NOTHING = 2.0**-60
"""Smaller than every nonzero product of two FP8 values and every nonzero accumulator."""


def hopper_mm(a: Quantized, b: Quantized, *, fast: bool) -> Tensor:
    """``a @ b.T`` as Hopper adds it up.

    Args:
        a: ``[M, K]``, with one scale or with blocks of 128 along K.
        b: ``[N, K]``, likewise.
        fast: One accumulator along all of K; for operands with one scale.

    Returns:
        float32 ``[M, N]``. Block scales are applied, tensorwise scales are not.
    """
    (m, k), n = a.data.shape, b.data.shape[0]
    blockwise = a.block is not None
    assert not (blockwise and fast), "block scales are applied at promotions"
    interval = k if fast else PROMOTION
    a_scale, b_scale = _scales(a), _scales(b)
    left, right = _Operand(a, "a"), _Operand(b, "b")
    out = torch.empty(m, n, dtype=torch.float32, device=a.data.device)
    # Elements of the result at a time: on a CPU few enough for the cache, on a GPU enough to fill the device.
    tile = 1 << 13 if out.device.type == "cpu" else 1 << 22
    rows = max(1, tile // max(1, n))
    for top in range(0, m, rows):
        total = out[top : top + rows].zero_()
        for first in range(0, k, interval):
            accumulator = torch.zeros_like(total)
            for start in range(first, min(first + interval, k), STEP):
                accumulator = _instruction(accumulator, left.part(start, top, rows), right.part(start, 0, n))
            if a_scale is not None and b_scale is not None:
                block = first // PROMOTION
                accumulator *= a_scale[top : top + rows, block, None] * b_scale[:, block]
            total += accumulator
    return out


class _Operand:
    """The FP8 values of an operand and ``2 ** exponent`` of each, both float32 ``[K, R]``."""

    def __init__(self, q: Quantized, place: str) -> None:
        self.values = dense_values(q, place).t().contiguous()
        least = torch.full((), q.fmt.min_normal, dtype=torch.float32, device=self.values.device)
        self.powers = torch.where(self.values == 0, 0.0, torch.maximum(_power_of_two(self.values), least))

    def part(self, start: int, top: int, rows: int) -> tuple[Tensor, Tensor]:
        """Values and powers of one instruction, ``[32, rows]``."""
        return (
            self.values[start : start + STEP, top : top + rows],
            self.powers[start : start + STEP, top : top + rows],
        )


def _instruction(accumulator: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """The accumulator ``[R, N]`` after 32 more products of ``a [32, R]`` and ``b [32, N]``.

    Nothing here rounds but :func:`torch.trunc` and the last line: products of FP8 values have 8 bits, in units of the last
    bit that is kept each term is below 2**15, and the 33 of them add up to less than 2**24.
    """
    (a_values, a_powers), (b_values, b_powers) = a, b
    terms = a_powers[:, :, None] * b_powers[:, None, :]
    largest = torch.maximum(terms.amax(dim=0), _power_of_two(accumulator)).clamp_min_(_NOTHING)
    per_unit = 2.0**BITS / largest
    torch.mul(a_values[:, :, None], b_values[:, None, :], out=terms)
    total = terms.mul_(per_unit).trunc_().sum(dim=0)
    total += torch.trunc(accumulator * per_unit)
    total *= largest * 2.0**-BITS
    return (total.view(torch.int32) & -(1 << (23 - BITS))).view(torch.float32)


def _power_of_two(x: Tensor) -> Tensor:
    """``2 ** floor(log2(|x|))``; 0 for 0, Inf for Inf and NaN."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def _scales(q: Quantized) -> Tensor | None:
    """``[R, K / 128]``: the scale of each row in each block along K."""
    if q.block is None:
        return None
    return q.gemm_scale.repeat_interleave(q.block[0], 0)[: q.data.shape[0]]
