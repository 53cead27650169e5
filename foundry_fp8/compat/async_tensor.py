"""A tensor whose collective still runs, waited for.

Cause: what a DTensor gathers or reduces is an ``AsyncCollectiveTensor`` (``torch/distributed/_functional_collectives.py``), which waits when one
of torch's operators reads it. Kernels read memory. Remove when ``DTensor.to_local`` waits, or can be asked to.
"""

from __future__ import annotations

from torch import Tensor

from foundry_fp8.config.versions import moved

__all__ = ["waited"]


def waited(x: Tensor) -> Tensor:
    """``x``, in memory once the current stream has come here."""
    try:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
    except ImportError as error:
        raise moved(
            f"no longer has AsyncCollectiveTensor, which FP8 layers wait for ({error})", "async_tensor"
        ) from error
    found: Tensor = x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x
    return found
