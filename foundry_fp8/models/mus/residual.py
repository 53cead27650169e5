"""The fixed(tau) residual: a weighted sum of stream and branch that keeps unit variance."""

from __future__ import annotations

import math
from typing import Annotated

from torch import Tensor

from foundry_fp8.config import above, below

__all__ = ["Tau", "branch_for_plain_residual", "default_tau", "fixed_residual"]

Tau = Annotated[float, above(0), below(1)]
"""The share of a branch in the variance of the residual stream."""

KNOWN_TAUS = ((4, 0.4), (100, 0.1))
"""Layers and tau, as the paper names them in its text."""


def default_tau(layers: int) -> float:
    """``0.4 (4 / layers)^0.43``: the power law through the two values that the paper's text names, at most 0.4.

    The paper measures the best tau for 20 to 100 layers in a figure without numbers; that it falls with depth and does not
    depend on width is its finding, the curve between the two points is this package's.

    Args:
        layers: Transformer blocks, of two branches each.

    Source:
        Narayan et al., arXiv 2502.05967: 0.4 for 4 layers (its transfer experiments), 0.1 for 100 (its ablations).
    """
    (shallow, high), (deep, low) = KNOWN_TAUS
    exponent = math.log(high / low) / math.log(deep / shallow)
    return round(min(high, high * (shallow / layers) ** exponent), 4)


def fixed_residual(stream: Tensor, branch: Tensor, tau: float) -> Tensor:
    """``sqrt(1 - tau) stream + sqrt(tau) branch``: of unit variance if both are and they are uncorrelated. Any shape."""
    return stream * math.sqrt(1 - tau) + branch * math.sqrt(tau)


def branch_for_plain_residual(stream: Tensor, branch: Tensor, tau: float) -> Tensor:
    """What a block that computes ``stream + result`` has to be given so that its sum is :func:`fixed_residual`."""
    return stream * (math.sqrt(1 - tau) - 1) + branch * math.sqrt(tau)
