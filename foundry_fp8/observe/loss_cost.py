"""What rounding the operands of a linear costs of the loss.

An error relative to what a layer multiplies does not say whether anyone feels it: what follows may take most of the product off again (a norm, a
softmax, another branch), or pass on every bit. What follows is in the gradient. Rounding adds ``e`` to ``y = x W^T``; with ``g`` the gradient of a
token's loss in y, that loss changes by ``g e + e H e / 2``. The first term has no mean. For the Hessian stands, as in pruning and in quantisation after
training, Fisher's information ``g g^T``, of which the diagonal is taken, because errors of different elements have nothing to do with each other. Of the
mean over N tokens, whose gradient is ``dy = g / N``, it is

    ``N / 2 * sum over tokens and channels of (dy e)^2``

Source:
    LeCun, Denker and Solla, "Optimal brain damage" (1990), equation 3; of a layer's outputs under quantisation: Li et al., "BRECQ" (arXiv
    2102.05426), section 3.3.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from foundry_fp8.observe.operand_stats import Sample

__all__ = ["Error", "loss_cost"]


@dataclasses.dataclass(frozen=True)
class Error:
    """What rounding added to a part of ``y``.

    Attributes:
        e: float32 ``[n, m]``.
        rows: Which tokens, of ``[R]``.
        columns: Which channels.
    """

    e: Tensor
    rows: Sample
    columns: Sample


def loss_cost(error: Error, dy: Tensor) -> Tensor:
    """Half the squares of ``dy e``, summed over the whole of ``y``, and R; float64 ``[2]``. Their product is in units of the loss if ``dy`` is the
    gradient of a mean over R tokens.

    Args:
        error: Of ``y`` ``[R, C]``.
        dy: The gradient of y, ``[R, C]``.
    """
    part = dy.detach()
    for dim, sample in enumerate((error.rows, error.columns)):
        if sample.rows is not None:
            part = part.index_select(dim, sample.rows)
    squares = (part.double() * error.e).square()
    total = 0.5 * (error.rows.weight @ squares @ error.columns.weight)
    return torch.stack([total, total.new_full((), len(dy))])
