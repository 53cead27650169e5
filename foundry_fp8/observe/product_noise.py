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
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.layers.autocast import autocast_type
from foundry_fp8.numerics.quantize import Quantized, quantize_block, quantize_tensor
from foundry_fp8.observe.operand_stats import Sample, dequantised, rounding_noise, spread

__all__ = ["Factor", "Product", "columns_of", "judge", "product", "product_noise", "rows_of", "tokens_of"]

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


@dataclasses.dataclass(frozen=True)
class Product:
    """``a b^T`` of two factors, and what rounding both did to it.

    Attributes:
        y: As it is, float32 ``[n, m]``, each row by the largest value of the row of ``a``.
        error: What rounding both adds, likewise.
        rows: How many each row stands for, float64 ``[n]``.
        columns: Each column, float64 ``[m]``.
        largest: The largest value of each row of ``a``, float32 ``[n, 1]``.
        noise: The relative error, squared, of rounding alone.
        of_tokens: The rows are tokens, and what all of them share is no content (:func:`_content`).
    """

    y: Tensor
    error: Tensor
    rows: Tensor
    columns: Tensor
    largest: Tensor
    noise: float
    of_tokens: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        """What those have in common that are judged together."""
        return self.y.shape, self.y.device, self.noise, self.of_tokens


def product(a: Factor, b: Factor, *, of_tokens: bool = True) -> Product:
    """``a b^T``; how it is judged says :func:`judge`.

    Args:
        a: Rows that count alike, however large what the product says of each is; of each no more is lost than there is.
        b: The other factor.
        of_tokens: The rows of ``a`` are tokens.
    """
    wide = a.exact.float()
    amax = wide.abs().amax(1, keepdim=True)
    unit = torch.where(amax > 0, 1 / amax, 0.0)  # squares of 1e-25 would be zero
    with torch.autocast(autocast_type(unit.device), enabled=False):
        y = (wide * unit) @ b.exact.float().t()
        error = (a.rounded.float() * unit) @ b.rounded.float().t() - y
    return Product(y, error, a.weight, b.weight, amax, a.noise + b.noise, of_tokens)


def judge(products: Sequence[Product]) -> Tensor:
    """What :func:`product_noise` is made of, float64 ``[N, 3]``: the error of each, squared and summed; what the product says, likewise; what
    rounding alone makes of the error, relatively.

    Args:
        products: Alike in :attr:`Product.kind`; together they take about as many operations as one.
    """
    weight = torch.stack([one.columns for one in products]).sqrt()[:, None]
    y, error = (
        torch.stack(parts) * weight for parts in zip(*((one.y, one.error) for one in products), strict=True)
    )
    size, lost = (torch.linalg.vector_norm(part, dim=2, keepdim=True) for part in (y, error))
    rows = torch.stack([one.rows for one in products]).sqrt()[..., None]
    weight = torch.where(size > 0, rows / size, 0.0)
    y, error = y * weight, error * weight * (size / lost.clamp_min(1e-300)).clamp_max(1.0)
    content = _content(y) if products[0].of_tokens else y.square().sum((1, 2))
    noise = content.new_full((len(products),), products[0].noise)
    return torch.stack([error.square().sum((1, 2)), content, noise], 1)


def _content(y: Tensor) -> Tensor:
    """What products ``[N, n, m]`` say of tokens, of their energy, ``[N]``: all, or what is left beside the few largest directions where they have
    more than :data:`LEFT` leaves: they are what all tokens share.
    """
    squares = y.square()
    signal = squares.sum((1, 2))[:, None]
    count = torch.minimum(_count(squares.sum(1)), _count(squares.sum(2)))
    rest = signal - _largest(y).cumsum(1)
    place = torch.arange(1, len(LEFT) + 1, device=y.device)
    counts = (count >= FEW * place) & (rest > NOTHING * signal)
    return torch.cat([signal, torch.where(counts, rest / _left(y.device), signal)], 1).amin(1)


@functools.lru_cache
def _left(device: torch.device) -> Tensor:
    """:data:`LEFT`, once a device: making it there waits for what the device has to do."""
    return torch.tensor(LEFT, dtype=torch.float64, device=device)


def _count(energy: Tensor) -> Tensor:
    """Of how many each ``[N, n]`` is, ``[N, 1]``: n where it is equal, 1 where one has all."""
    return energy.sum(1, keepdim=True).square() / energy.square().sum(1, keepdim=True)


def _largest(y: Tensor) -> Tensor:
    """The energies of the largest directions of each, float64 ``[N, len(LEFT)]``, by orthogonal iteration; nothing waits."""
    gram = y.mT @ y if y.shape[2] <= y.shape[1] else y @ y.mT
    size = gram.shape[1]
    directions = _any_directions(size, min(size, 2 * len(LEFT)), y.device).expand(len(y), -1, -1)
    for _ in range(TURNS):
        directions = _orthonormal(gram @ directions)
    found = (directions * (gram @ directions)).sum(1).sort(descending=True)[0]
    return torch.nn.functional.pad(found, (0, max(0, len(LEFT) - found.shape[1])))[:, : len(LEFT)]


def _orthonormal(x: Tensor) -> Tensor:
    """An orthonormal basis of the columns of each ``[N, n, k]``."""
    return torch.linalg.qr(x)[0] if x.device.type == "cpu" else _gram_schmidt(x)


def _gram_schmidt(x: Tensor) -> Tensor:
    """The same in operations on all of them; torch's QR goes through them one by one on a GPU.

    Source:
        Each column is made orthogonal twice, which is enough: Giraud, Langou, Rozloznik and van den Eshof, "Rounding error analysis of the
        classical Gram-Schmidt orthogonalization process", Numer. Math. 101 (2005). Of torch: https://github.com/pytorch/pytorch/issues/143281
    """
    basis = x[..., :0]
    for column in x.split(1, dim=-1):
        for _ in range(2):
            column = torch.nn.functional.normalize(column, dim=1, eps=1e-300)
            column = column - basis @ (basis.mT @ column)
        basis = torch.cat([basis, torch.nn.functional.normalize(column, dim=1, eps=1e-300)], -1)
    return basis


@functools.lru_cache(maxsize=256)
def _any_directions(count: int, directions: int, device: torch.device) -> Tensor:
    return torch.randn(count, directions, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(
        device
    )


def product_noise(row: Sequence[float]) -> float:
    """The error of a product, in units of what rounding alone makes of it: 1 / that where nothing is left of the product.

    Args:
        row: From :func:`judge`. NaN if something is not finite.
    """
    error, content, rounding = row
    if not math.isfinite(error + content):
        return math.nan
    if error == 0:
        return 0.0
    return (1.0 if error >= content else error / content) / rounding
