"""Kurtosis of a tensor, uncentred: ``K = mean(x^4) / mean(x^2)^2``.

3 for a Gaussian, 1 if all elements are equal in size, D if one of D elements holds everything. Two variants:

*per token*: over the features of each token, then averaged over tokens. It sees a channel that sticks out.
*per sample*: over all tokens and features of each sample, then averaged over samples. It also sees a token that
sticks out: one token 50 times as large among 512 leaves the first at 3 and takes the second to about 1060.

Source: the FOG poster (https://alehc.com/papers/neurips2025-fog.html) gives the per-token formula with the variance of
``x^2`` below the line, which would be ``K / (K - 1)``; its code (``anonymous4375934/FOG``, ``metrics_tracking.py``)
divides by the squared mean, over the flattened sample. Moments here are float32 or better, not the activation's dtype.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from foundry_fp8.observe.sampling import spread_rows

__all__ = ["Tokens", "kurtosis_per_sample", "kurtosis_per_token", "row_sums", "sample_tokens"]

SAMPLE = 128
"""Tokens of a long sequence that are looked at; one of up to four times as many is looked at whole."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Some tokens of every sequence, by place: evenly spread ones, and the one with the largest value, which counts for itself.

    Attributes:
        index: ``[n]`` for ``[N, D]``, ``[B, n]`` for ``[B, S, D]``.
        weight: How many tokens each stands for, float64 ``[n]``.
    """

    index: Tensor
    weight: Tensor

    def take(self, rows: Tensor) -> Tensor:
        """Those tokens of ``rows``."""
        if self.index.dim() == 1:
            return rows[self.index]
        return rows[torch.arange(len(rows), device=rows.device)[:, None], self.index]


def sample_tokens(x: Tensor, leading: int) -> Tokens | None:
    """Which tokens of ``x`` to look at; ``None`` for all. Arguments as of :func:`row_sums`."""
    rows = x.detach().flatten(leading)
    if rows.shape[leading - 1] <= 4 * SAMPLE:  # looking for the largest would cost more than is spared
        return None
    return Tokens(*spread_rows(rows, SAMPLE))


def row_sums(x: Tensor, leading: int, tokens: Tokens | None = None) -> tuple[Tensor, Tensor, int]:
    """The second and fourth power, summed over features.

    Args:
        x: ``[..., features...]``, any float dtype.
        leading: Dimensions in front that count tokens (2 for ``[B, S, D]``, 1 for ``[N, D]``).
        tokens: Which; all by default.

    Returns:
        ``sum(x^2)`` and ``sum(x^4)``, float64, in the shape of the leading dimensions, and the number of features.
    """
    rows = x.detach().flatten(leading)
    rows = (rows if tokens is None else tokens.take(rows)).float()
    # A gradient of 1e-12 has a fourth power that float32 does not hold. Each row is brought near 1 by a power of two, which is
    # exact, summed in float32, and its sums are brought back in float64. A row with NaN or Inf keeps exponent 0.
    exponent = torch.frexp(rows.abs().amax(-1, keepdim=True))[1].clamp(-126, 126)
    squares = torch.ldexp(rows, -exponent).square()
    back = torch.ldexp(torch.ones_like(exponent[..., 0], dtype=torch.float64), 2 * exponent[..., 0])
    return squares.sum(-1) * back, squares.square().sum(-1) * back.square(), squares.shape[-1]


def kurtosis_per_token(s2: Tensor, s4: Tensor, features: int, weight: Tensor | None = None) -> Tensor:
    """Mean over tokens of ``D sum(x^4) / sum(x^2)^2``; 0-d float32. Tokens that are all zero are left out; NaN is not.

    ``weight`` is :attr:`Tokens.weight`, if the sums are of a sample.
    """
    counted = s2 != 0  # true for NaN
    weight = counted.double() if weight is None else counted * weight
    ratio = torch.where(counted, features * s4 / s2.square(), 0.0)
    return ((ratio * weight).sum() / weight.sum()).float()


def kurtosis_per_sample(s2: Tensor, s4: Tensor, features: int, weight: Tensor | None = None) -> Tensor:
    """Mean over samples of ``S D sum(x^4) / sum(x^2)^2``; 0-d float32. ``s2``, ``s4``: ``[B, S]``; see :func:`kurtosis_per_token`.

    Tokens that are all zero do not count as tokens.
    """
    weight = torch.ones(s2.shape[-1], dtype=torch.float64, device=s2.device) if weight is None else weight
    flat = (s2 * weight).sum(-1), (s4 * weight).sum(-1)
    return kurtosis_per_token(flat[0], flat[1] * ((s2 != 0) * weight).sum(-1), features)
