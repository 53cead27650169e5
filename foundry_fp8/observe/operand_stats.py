"""What one pass over an operand tells: outliers, and what quantisation did to it.

The pass is over a sample of rows: all of a small tensor, :data:`SAMPLE` of a large one, spread evenly over it by the golden
ratio (no stride, which would meet the same place of every sequence), and the row with the largest value besides, which counts for
itself alone: an outlier in one token of a thousand is there whatever the sample. Sums over a sample are scaled to the whole tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from foundry_fp8.numerics.formats import Float8Format
from foundry_fp8.numerics.quantize import Quantized

__all__ = [
    "FIELDS",
    "SAMPLE",
    "Sample",
    "dequantised",
    "moments",
    "quantisation",
    "rounding_noise",
    "sample_rows",
    "spread",
]

SAMPLE = 128
"""Rows of a large tensor that are looked at."""

FIELDS = (
    "amax",
    "tokens",
    "elements",
    "s2",
    "s4",
    "kurtosis",
    "scale",
    "saturated",
    "flushed",
    "error",
    "relative_error",
    "constant",
    "shared",
)
"""What :func:`moments` and, from ``scale`` on, :func:`quantisation` give, in this order, float64. All but amax and scale add up."""  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sample:
    """Rows of a tensor ``[R, C]``.

    Attributes:
        rows: Their indices ``[n]``; ``None`` for all.
        weight: How many rows of the tensor each stands for, float64 ``[n]``.
        amaxes: max |x| of each, float32 ``[n]``.
        amax: max |x| over the whole tensor, 0-d float32.
    """

    rows: Tensor | None
    weight: Tensor
    amaxes: Tensor
    amax: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Those rows of ``x``, whose dtype may be FP8."""
        if self.rows is None:
            return x
        if x.element_size() == 1:
            return x.view(torch.uint8).index_select(0, self.rows).view(x.dtype)
        return x.index_select(0, self.rows)


@functools.lru_cache(maxsize=256)
def spread(count: int, sample: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``sample`` rows of ``count``, and how many each stands for; one weight more, for the row with the largest value."""
    golden = (math.sqrt(5) - 1) / 2
    rows = sorted({int((i * golden) % 1.0 * count) for i in range(sample)})
    weight = [count / len(rows)] * len(rows) + [1.0]
    return (
        torch.tensor(rows, device=device),
        torch.tensor(weight, dtype=torch.float64, device=device),
    )


def sample_rows(x: Tensor) -> Sample:
    """Which rows of ``x`` ``[R, C]``, hp, to look at. Reads ``x`` twice for their amaxes and allocates nothing of its size."""
    x = x.detach()
    amaxes = torch.maximum(x.amax(1), -x.amin(1)).float()
    amax, largest = amaxes.max(0)  # NaN is the largest
    if len(x) <= SAMPLE:
        return Sample(None, _ones(len(x), x.device), amaxes, amax)
    rows, weight = spread(len(x), SAMPLE, x.device)
    rows = torch.cat([rows, largest[None]])
    return Sample(rows, weight, amaxes.index_select(0, rows), amax)


def moments(x: Tensor, sample: Sample) -> Tensor:
    """The first six of :data:`FIELDS`, float64 ``[6]``.

    ``s2`` and ``s4`` sum the second and fourth powers, ``kurtosis`` sums over tokens ``C sum(x^4) / sum(x^2)^2`` of each;
    ``tokens`` counts those that are not all zero.

    Args:
        x: ``[R, C]``, hp.
        sample: :func:`sample_rows` of it.
    """
    rows = sample.take(x.detach()).float()
    factor, back = _near_one(sample)
    found = _weighted(sample, *_moments((rows * factor).square(), back))
    return torch.cat([sample.amax.double()[None], _in_order(found, sample, rows.shape[1])])


def quantisation(x: Tensor, q: Quantized, sample: Sample) -> Tensor:
    """All of :data:`FIELDS`, float64 ``[13]``.

    ``scale`` is what the block with the largest value was multiplied with; ``saturated`` counts elements beyond what rounding
    alone would bring to the format's maximum, ``flushed`` those that were not zero and became zero; ``error`` sums ``(x -
    Q(x))^2``, and ``relative_error`` over tokens that sum divided by the sum of ``x^2``; ``constant`` sums, like ``s2``, what the
    mean over tokens makes of the few channels that stick out with nearly the same value on all of them, ``shared`` of all
    channels that have nearly the same value on all.

    Args:
        x: ``[R, C]``, hp.
        q: What became of it.
        sample: :func:`sample_rows` of ``x``.
    """
    rows = sample.take(x.detach()).float()
    data = _wide(sample.take(q.data))
    factor, back = _near_one(sample)
    columns = rows.shape[1]
    scale_inv = _per_element(q, q.scale_inv, sample, columns)
    # Half a step above the maximum still rounds to it: 464 for E4M3, 61440 for E5M2.
    limit = q.fmt.max + {448.0: 16.0, 57344.0: 4096.0}.get(q.fmt.max, 0.0)
    saturated = (rows.abs() > scale_inv * limit).sum(1)
    flushed = data.eq(0).sum(1) - rows.eq(0).sum(1)  # what was zero is zero
    near = rows.mul_(factor) if rows.data_ptr() != x.data_ptr() else rows * factor
    gemm_scale = _per_element(q, q.gemm_scale, sample, columns)
    squares = near.square()
    means = _means(near, squares, back, sample)
    error = near.addcmul_(data, gemm_scale * factor, value=-1.0).square_().sum(1).double()
    s2, *others = _moments(squares, back)
    lost = torch.where(s2 != 0, error * back / s2, 0.0)
    found = _weighted(sample, s2, *others, saturated, flushed, error * back, lost)
    # Not [argmax()]: an index of one element is read by the host, which would wait for the device.
    largest = q.scale_inv.flatten().gather(0, q.amax.flatten().argmax(0, keepdim=True))
    amax = q.amax.max()[None]  # without the NaN that the tensor may hold
    return torch.cat(
        [amax.double(), _in_order(found, sample, columns), 1.0 / largest.double(), found[4:], means]
    )


def dequantised(q: Quantized, sample: Sample, columns: int) -> Tensor:
    """What became of the sampled rows, float32 ``[n, columns]``."""
    return _wide(sample.take(q.data)) * _per_element(q, q.gemm_scale, sample, columns)


def _wide(data: Tensor) -> Tensor:
    """FP8 as float32. The CPU converts element by element, which takes five times as long as looking each one up."""
    if data.device.type != "cpu":
        return data.float()
    index = data.contiguous().view(torch.uint8).flatten().int()
    return _values(data.dtype).index_select(0, index).view(data.shape)


@functools.lru_cache
def _values(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def rounding_noise(fmt: Float8Format) -> float:
    """The relative error, squared, that rounding to ``fmt`` makes of normal numbers whose logarithm is uniform: 7.0e-4 (31.5 dB)
    for E4M3, 2.8e-3 (25.5 dB) for E5M2.

    Source:
        ``E[(step^2 / 12) / x^2]`` over one binade: ``step^2 / 12`` times the mean of ``x^-2``, ``3 / (8 ln 2)``.
    """
    return _step(fmt) ** 2 / 12 * 3 / (8 * math.log(2))


def _step(fmt: Float8Format) -> float:
    """Of the numbers from 1 to 2."""
    return fmt.min_subnormal / fmt.min_normal


@functools.lru_cache(maxsize=256)
def _ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count, dtype=torch.float64, device=device)


def _near_one(sample: Sample) -> tuple[Tensor, Tensor]:
    """The powers of two that bring each row near 1, float32 ``[n, 1]``, and what its squares are multiplied with to be those of the
    row again, float64 ``[n]``.

    A gradient of 1e-12 has a fourth power that float32 does not hold. A row with NaN or Inf keeps 1.
    """
    exponent = torch.frexp(sample.amaxes)[1].clamp(-126, 126)
    factor = torch.ldexp(torch.ones_like(sample.amaxes), -exponent)
    return factor[:, None], factor.double().square().reciprocal()


def _moments(squares: Tensor, back: Tensor) -> list[Tensor]:
    """Of each row, from the squares of it near 1: sum of squares, of fourth powers, kurtosis, and whether it is not all zero."""
    s2, s4 = squares.sum(1).double(), squares.square().sum(1).double()
    counted = s2 != 0  # true for NaN
    kurtosis = torch.where(counted, squares.shape[1] * s4 / s2.square(), 0.0)
    return [s2 * back, s4 * back.square(), kurtosis, counted]


def _means(near: Tensor, squares: Tensor, back: Tensor, sample: Sample) -> Tensor:
    """``constant`` and ``shared`` of :data:`FIELDS`, float64 ``[2]``, from what the mean over rows makes of each channel: of those
    of which it is more than half, less the variance over the number of rows, which any mean has by chance. ``constant`` is of
    channels with 16 times the energy of the average one.
    """
    rows = len(near)
    if rows == 1:
        return back.new_zeros(2)
    largest = back.max()
    share = back / largest  # powers of two, so that sums over rows are in one unit again
    weight = torch.stack([share.sqrt() * sample.weight, share * sample.weight]).float()
    of_mean = (weight[:1] @ near).square_() / sample.weight.sum()
    energy = weight[1:] @ squares
    sticks_out = energy > 16 * energy.mean()
    of_mean = of_mean - (energy - of_mean) / (rows - 1)
    of_mean = of_mean * (2 * of_mean > energy)
    return torch.cat([of_mean * sticks_out, of_mean]).sum(1).double() * largest


def _weighted(sample: Sample, *of_rows: Tensor) -> Tensor:
    """Each ``[n]`` summed over the whole tensor, float64."""
    return torch.stack([values.double() for values in of_rows]) @ sample.weight


def _in_order(found: Tensor, sample: Sample, columns: int) -> Tensor:
    """Tokens, elements, s2, s4, kurtosis, as :data:`FIELDS` has them."""
    return torch.stack([found[3], sample.weight.sum() * columns, found[0], found[1], found[2]])


def _per_element(q: Quantized, per_block: Tensor, sample: Sample, columns: int) -> Tensor:
    """``per_block``, so that it broadcasts against the sampled rows."""
    if q.block is None:
        return per_block
    rows = per_block
    if sample.rows is not None:
        rows = per_block.index_select(0, sample.rows // q.block[0])
    elif q.block[0] > 1:
        rows = per_block.repeat_interleave(q.block[0], 0)[: len(q.data)]
    return rows.repeat_interleave(q.block[1], 1)[:, :columns]
