"""What rounding the operands of a linear, or of an attention, costs of the loss.

An error relative to what a layer multiplies does not say whether anyone feels it: what follows may take most of the product off again (a norm, a
softmax, another branch), or pass on every bit. What follows is in the gradient. Rounding adds ``e`` to ``y = x W^T``; with ``g`` the gradient of a
token's loss in y, that loss changes by ``g e + e H e / 2``. The first term has no mean. For the Hessian stands, as in pruning and in quantisation after
training, Fisher's information ``g g^T``, of which the diagonal is taken, because errors of different elements have nothing to do with each other. Of the
mean over N tokens, whose gradient is ``dy = g / N``, it is

    ``N / 2 * sum over tokens and channels of (dy e)^2``

Errors of one query's output are not of that kind: each is a sum of values that errors of the same probabilities weigh. There whole vectors are taken,

    ``N / 2 * sum over queries and heads of (do . e)^2``

Source:
    LeCun, Denker and Solla, "Optimal brain damage" (1990), equation 3; of a layer's outputs under quantisation: Li et al., "BRECQ" (arXiv
    2102.05426), section 3.3.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from foundry_fp8.observe.operand_stats import Sample

__all__ = ["Error", "attention_cost", "loss_cost"]


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


def attention_cost(e: Tensor, do: Tensor, queries: int, tokens: int) -> Tensor:
    """Likewise of what an attention puts out; float64 ``[2]``.

    Args:
        e: What rounding added to some queries of some heads, ``[n, m, d]``.
        do: The gradient that came back for these.
        queries: Of how many of all heads they are some.
        tokens: Of how many the loss is the mean.
    """
    total = 0.5 * queries * (e.double() * do).sum(-1).square().mean()
    return torch.stack([total, total.new_full((), tokens)])
