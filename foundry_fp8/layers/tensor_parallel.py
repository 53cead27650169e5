"""A linear whose weight is a DTensor: each rank multiplies its own shard, with scales of its own.

========= ============ =============== ==================== ============ ======================
style     weight       x               y                    dX           bias
========= ============ =============== ==================== ============ ======================
colwise   ``Shard(0)`` the same        its columns          partial sum  its part
rowwise   ``Shard(1)`` its columns     partial sum          its columns  added on the first rank
========= ============ =============== ==================== ============ ======================

Partial sums are added in high precision by whom torch's plan says, as those of the unconverted linear are: FP8 adds no collective of its own but
delayed scaling's, whose amaxes are those of the whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_fp8.compat.async_tensor import waited

__all__ = ["multiply_shards", "summed_in_backward"]


def multiply_shards(layer: Any, x: Any, weight: Any, bias: Any) -> Tensor:
    """The forward of ``layer`` on this rank, in FP8, differentiable.

    Args:
        layer: The :class:`~foundry_fp8.layers.linear.FP8Linear`.
        x: A DTensor ``[..., in_features]``, hp; brought to the placement above where it has another.
        weight: The DTensor ``[out_features, in_features]``, sharded over one dimension of a mesh.
        bias: ``[out_features]``, a DTensor too.

    Returns:
        A DTensor ``[..., out_features]``.

    Raises:
        RuntimeError: Another placement of the weight.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    colwise = weight.placements == (Shard(0),)
    if not (colwise or weight.placements == (Shard(1),)):
        raise RuntimeError(
            f"{layer.fqn}: FP8 layers run under tensor parallelism of one mesh dimension, with the weight in Shard(0) (ColwiseParallel) or Shard(1) "
            f"(RowwiseParallel); here it is {weight.placements}. "
            "Leave the layer in high precision (algorithms.fp8.exclude)."
        )
    mesh, last = weight.device_mesh, Shard(x.dim() - 1)
    if (slots := layer.slots) is not None:
        slots["x"].state.group.also(mesh.get_group())
    x = x.redistribute(mesh, [Replicate() if colwise else last])
    part = _Waited.apply(x.to_local(grad_placements=[Partial() if colwise else last]))  # type: ignore[no-untyped-call]
    if bias is not None:
        bias = bias.to_local()
        if not colwise and mesh.get_local_rank() != 0:
            bias = _Zeros.apply(bias)  # type: ignore[no-untyped-call]
    y = _Waited.apply(layer.backend.linear(layer, part, weight.to_local(), bias))  # type: ignore[no-untyped-call]
    return DTensor.from_local(y, mesh, [last if colwise else Partial()], run_check=False)


def summed_in_backward(x: Tensor, mesh: Any) -> Tensor:
    """``x``, the same on all ranks of ``mesh``, each of which uses it for some of the columns: its gradient is their sum."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    same = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    own: Tensor = same.to_local(grad_placements=[Partial()])
    return own


class _Waited(torch.autograd.Function):
    """:func:`waited` for, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return waited(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return waited(dx)


class _Zeros(torch.autograd.Function):
    """Adds nothing and gets the whole gradient, which every rank has, so that replicas of a bias stay equal."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, db: Tensor) -> Tensor:
        return db
