"""What rounding two operands does to their product.

Each operand may be rounded as well as ever and the product be lost. Where high precision multiplies what grew by what cancels it, or one
direction of the product (a mean, a singular value) has grown, rounding errors are of the size of what grew, in every direction, and what
else the product says is below them.

Of a linear, ``y = x W^T`` is looked at, some rows of x with some of W, ``dx = dy W``, some rows of dy with some columns of W, and ``dW = dy^T x``,
some columns of dy with some of x, by all tokens: what tokens say may cancel in that sum, though each is well.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foundry_fp8.layers.autocast import autocast_type
from foundry_fp8.numerics.quantize import Quantized, quantize_block, quantize_tensor
from foundry_fp8.observe.operand_stats import Sample, dequantised, rounding_noise, spread

__all__ = ["Factor", "columns_of", "product", "product_noise", "rows_of", "tokens_of"]

COLUMNS = 16
"""Columns that are kept from forward to backward: of W, and of x."""
LEFT = (0.5, 0.25, 0.125, 0.0625)
"""What is left beside the largest direction of a product, the two largest, ..., of its energy, before the error counts against that
alone. Products in runs that are well have large directions, too."""
FEW = 8
"""Of fewer tokens or channels for each direction, counted by what they have of the energy, these directions are most of what there is."""
NOTHING = 1e-9
"""What is left beside the largest directions if nothing is: one neuron that fires."""
TURNS = 6
"""Of the orthogonal iteration; directions that are not told apart by then are of one size."""


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


def tokens_of(x: Tensor, q: Quantized) -> Factor:
    """:data:`COLUMNS` columns of ``x`` ``[T, C]``, hp, spread evenly, by all tokens, as wgrad takes them: blocks are along tokens."""
    columns, weight = spread(x.shape[1], COLUMNS, x.device)
    exact = x.detach().index_select(1, columns).t().contiguous()
    if q.block is None:
        rounded = quantize_tensor(exact, q.scale_inv.reciprocal(), q.fmt)
    else:
        rounded = quantize_block(exact, (1, q.block[1]), q.fmt)
    return Factor(exact, rounded.dequantize().to(x.dtype), weight[:-1], rounding_noise(q.fmt))


def product(a: Factor, b: Factor, *, of_tokens: bool = True) -> Tensor:
    """What :func:`product_noise` is made of, float64 ``[3]``: the error of ``a b^T``, squared and summed; what ``a b^T`` says, likewise;
    what rounding alone makes of the error, relatively.

    Args:
        a: Rows that count alike, however large what the product says of each is; of each no more is lost than there is.
        b: The other factor.
        of_tokens: The rows of ``a`` are tokens, and what all of them share is no content (:func:`_content`).
    """
    wide = a.exact.float()
    amax = wide.abs().amax(1, keepdim=True)
    unit = torch.where(amax > 0, 1 / amax, 0.0)  # squares of 1e-25 would be zero
    with torch.autocast(autocast_type(unit.device), enabled=False):
        y = (wide * unit) @ b.exact.float().t()
        error = (a.rounded.float() * unit) @ b.rounded.float().t() - y
    weight = b.weight.sqrt()
    y, error = y * weight, error * weight
    size, lost = (torch.linalg.vector_norm(part, dim=1, keepdim=True) for part in (y, error))
    weight = torch.where(size > 0, a.weight.sqrt()[:, None] / size, 0.0)
    y, error = y * weight, error * weight * (size / lost.clamp_min(1e-300)).clamp_max(1.0)
    content = _content(y) if of_tokens else y.square().sum()
    return torch.stack([error.square().sum(), content, y.new_full((), a.noise + b.noise)])


def _content(y: Tensor) -> Tensor:
    """What a product says of tokens, of its energy, 0-d: all, or what is left beside its few largest directions where they have more than :data:`LEFT`
    leaves: they are what all tokens share.
    """
    squares = y.square()
    signal = squares.sum()
    count = torch.minimum(_count(squares.sum(0)), _count(squares.sum(1)))
    largest = _largest(y).cumsum(0)
    rest = signal - largest
    place = torch.arange(1, len(LEFT) + 1, device=y.device)
    counts = (count >= FEW * place) & (rest > NOTHING * signal)
    left = torch.tensor(LEFT, dtype=y.dtype, device=y.device)
    return torch.minimum(signal, torch.where(counts, rest / left, signal).min())


def _count(energy: Tensor) -> Tensor:
    """Of how many the energy is, 0-d: n where it is equal, 1 where one has all."""
    return energy.sum().square() / energy.square().sum()


def _largest(y: Tensor) -> Tensor:
    """The energies of the largest directions of ``y``, float64 ``[len(LEFT)]``, by orthogonal iteration; nothing waits."""
    gram = y.t() @ y if y.shape[1] <= y.shape[0] else y @ y.t()
    directions = _any_directions(len(gram), min(len(gram), 2 * len(LEFT)), y.device)
    for _ in range(TURNS):
        directions = torch.linalg.qr(gram @ directions)[0]
    found = (directions * (gram @ directions)).sum(0).sort(descending=True)[0]
    return torch.nn.functional.pad(found, (0, max(0, len(LEFT) - len(found))))[: len(LEFT)]


@functools.lru_cache(maxsize=256)
def _any_directions(count: int, directions: int, device: torch.device) -> Tensor:
    return torch.randn(count, directions, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(
        device
    )


def product_noise(row: Sequence[float]) -> float:
    """The error of a product, in units of what rounding alone makes of it: 1 / that where nothing is left of the product.

    Args:
        row: From :func:`product`. NaN if something is not finite.
    """
    error, content, rounding = row
    if not math.isfinite(error + content):
        return math.nan
    if error == 0:
        return 0.0
    return (1.0 if error >= content else error / content) / rounding
