"""Kurtosis of a tensor, uncentred: ``K = mean(x^4) / mean(x^2)^2``.

3 for a Gaussian, 1 if all elements are equal in size, D if one of D elements holds everything. Two variants:

*per token*: over the features of each token, then averaged over tokens. It sees a channel that sticks out.
*per sample*: over all tokens and features of each sample, then averaged over samples. It also sees a token that
sticks out: one token 50 times as large among 512 leaves the first at 3 and takes the second to about 1060.

Source: the FOG poster (https://alehc.com/papers/neurips2025-fog.html) gives the per-token formula with the variance of
``x^2`` below the line, which would be ``K / (K - 1)``; its code (``anonymous4375934/FOG``, ``metrics_tracking.py``)
divides by the squared mean, over the flattened sample. Moments here are float32, not the activation's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["kurtosis_per_sample", "kurtosis_per_token", "row_sums"]


def row_sums(x: Tensor, leading: int) -> tuple[Tensor, Tensor, int]:
    """The second and fourth power, summed over features.

    Args:
        x: ``[..., features...]``, any float dtype.
        leading: Dimensions in front that count tokens (2 for ``[B, S, D]``, 1 for ``[N, D]``).

    Returns:
        ``sum(x^2)`` and ``sum(x^4)``, float32, in the shape of the leading dimensions, and the number of features.
    """
    squares = x.detach().flatten(leading).float().square()
    return squares.sum(-1), squares.square().sum(-1), squares.shape[-1]


def kurtosis_per_token(s2: Tensor, s4: Tensor, features: int) -> Tensor:
    """Mean over tokens of ``D sum(x^4) / sum(x^2)^2``; 0-d float32. Tokens that are all zero are left out; NaN is not."""
    counted = s2 != 0  # true for NaN
    ratio = torch.where(counted, features * s4 / s2.square(), 0.0)
    return ratio.sum() / counted.sum()


def kurtosis_per_sample(s2: Tensor, s4: Tensor, features: int) -> Tensor:
    """Mean over samples of ``S D sum(x^4) / sum(x^2)^2``; 0-d float32. ``s2``, ``s4``: ``[B, S]``."""
    return kurtosis_per_token(s2.sum(-1), s4.sum(-1), features * s2.shape[-1])
