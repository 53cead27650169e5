"""What rounding two operands does to their product.

Each operand may be rounded as well as ever and the product be lost. Where high precision multiplies what grew by what cancels it, or one
direction of the product (a mean, a singular value) has grown, rounding errors are of the size of what grew, in every direction, and what
else the product says is below them.

Of a linear, ``y = x W^T`` is looked at, some rows of x with some of W, and ``dx = dy W``, some rows of dy with some columns of W. ``dW = dy^T x``
is not: it sums over all tokens, and x in high precision is gone when dy comes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foundry_fp8.layers.autocast import autocast_type
from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.observe.operand_stats import Sample, dequantised, rounding_noise, spread

__all__ = ["Factor", "columns_of", "product", "product_noise", "rows_of"]

COLUMNS = 16
"""Columns of W that are kept from forward to backward."""
LARGEST = 0.5
"""What is left beside the largest direction of a product, of its energy, before the error counts against that alone. Products in runs that
are well have a largest direction, too."""
FEW = 8
"""Of fewer tokens or channels, counted by what they have of the energy, one direction is most of what there is."""
NOTHING = 1e-9
"""What is left beside the largest direction if nothing is: one neuron that fires."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """A part of an operand.

    Attributes:
        exact: ``[n, K]``, by what is summed over.
        rounded: What quantisation made of it.
        weight: How many of the operand's rows or columns each stands for, float64 ``[n]``.
        noise: The relative error, squared, of rounding alone.
    """

    exact: Tensor
    rounded: Tensor
    weight: Tensor
    noise: float


def rows_of(x: Tensor, q: Quantized, sample: Sample) -> Factor:
    """The sampled rows of ``x`` ``[R, C]``, in float32."""
    return Factor(
        sample.take(x.detach()).float(),
        dequantised(q, sample, x.shape[1]),
        sample.weight,
        rounding_noise(q.fmt),
    )


def columns_of(x: Tensor, q: Quantized) -> Factor:
    """:data:`COLUMNS` columns of ``x`` ``[R, C]``, hp, spread evenly, in its dtype."""
    columns, weight = spread(x.shape[1], COLUMNS, x.device)
    data = q.data.view(torch.uint8).index_select(1, columns).view(q.data.dtype).float()
    scale = q.gemm_scale
    if q.block is not None:
        scale = scale.index_select(1, columns // q.block[1]).repeat_interleave(q.block[0], 0)[: len(x)]
    rounded = (data * scale).to(x.dtype)
    exact = x.detach().index_select(1, columns)
    return Factor(exact.t(), rounded.t(), weight[:-1], rounding_noise(q.fmt))


def product(a: Factor, b: Factor) -> Tensor:
    """What :func:`product_noise` is made of, float64 ``[4]``: the error of ``a b^T``, squared and summed; the same of ``a b^T`` and of its
    largest direction; what rounding alone makes of the error, relatively.

    Args:
        a: Tokens, each of which counts alike, however large.
        b: Of a weight.
    """
    amax = a.exact.abs().amax(1, keepdim=True)
    size = amax * torch.linalg.vector_norm(
        a.exact / amax, dim=1, keepdim=True
    )  # squares of 1e-25 would be zero
    unit = torch.where(size > 0, 1 / size, 0.0)
    with torch.autocast(autocast_type(size.device), enabled=False):
        y = (a.exact * unit) @ b.exact.float().t()
        error = (a.rounded * unit) @ b.rounded.float().t() - y
    weight = a.weight.sqrt()[:, None] * b.weight.sqrt()
    y, error = y * weight, error * weight
    squares = y.square()
    signal = squares.sum()
    many = torch.minimum(_count(squares.sum(0)), _count(squares.sum(1))) >= FEW
    largest = torch.where(many, signal * _largest_share(y), 0.0)
    return torch.stack([error.square().sum(), signal, largest, signal.new_full((), a.noise + b.noise)])


def _count(energy: Tensor) -> Tensor:
    """Of how many the energy is, 0-d: n where it is equal, 1 where one has all."""
    return energy.sum().square() / energy.square().sum()


def _largest_share(y: Tensor) -> Tensor:
    """Of the energy of ``y``, float64, by the 64th power of its Gram matrix, which is nearly of that direction alone; nothing waits."""
    gram = y.t() @ y
    power = gram = gram / gram.trace()
    for _ in range(6):
        power = power @ power  # of a share of 1 / 129 still 1e-135
    return (gram * power).sum() / power.trace()


def product_noise(row: Sequence[float]) -> float:
    """The error of a product, in units of what rounding alone makes of it: 1 / that where nothing is left of the product.

    Args:
        row: From :func:`product`. NaN if something is not finite.
    """
    error, signal, largest, rounding = row
    rest = signal - largest
    content = min(signal, rest / LARGEST) if rest > NOTHING * signal else signal
    if not math.isfinite(error + signal):
        return math.nan
    if error == 0:
        return 0.0
    return (1.0 if error >= content else error / content) / rounding
