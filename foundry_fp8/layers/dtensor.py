"""Whether a tensor lies in parts on several ranks."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["is_dtensor"]


def is_dtensor(x: Tensor) -> bool:
    """Whether ``x`` is a DTensor, as FSDP2 keeps parameters between forwards and tensor parallelism keeps them in it."""
    if type(x) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # half a second to import, and not in every build of torch

    return isinstance(x, DTensor)
