"""Whether a tensor is a DTensor (sharded over ranks)."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["is_dtensor", "own_share", "whole"]


def is_dtensor(x: Tensor) -> bool:
    """Whether ``x`` is a DTensor: under FSDP2 parameters are between forwards, under tensor parallelism always."""
    if type(x) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # slow (half a second), and not in every build of torch

    return isinstance(x, DTensor)


def whole(x: Tensor) -> Tensor:
    """``x``, gathered where it is a DTensor: a collective."""
    return x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]


def own_share(x: Tensor) -> float:
    """This rank's share of the elements of ``x``: 1 but where it is a DTensor."""
    return x.detach().to_local().numel() / x.numel() if is_dtensor(x) else 1.0  # type: ignore[attr-defined]
