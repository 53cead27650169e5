"""Parameters that DDP neither sends at its start nor reduces.

Cause: DDP sends every parameter of rank 0, frozen ones too, by the address of its memory, which a tensor made of others does not have. It
leaves out what a module lists, by a method without a public name
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/nn/parallel/distributed.py, ``_set_params_and_buffers_to_ignore_for_model``). Remove when there is one.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.config.versions import TORCHES

__all__ = ["leave_out_of_ddp"]

if not hasattr(DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model"):
    raise RuntimeError(
        f"this torch's DistributedDataParallel has no way to leave parameters out, which algorithms.fp8.frozen_weights needs. {TORCHES}, "
        "or adapt foundry_fp8/compat/ddp_left_out.py."
    )


def leave_out_of_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Of a DDP around ``model``: the parameters of these names, beside those that are left out already."""
    known = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted({*known, *names}))  # type: ignore[no-untyped-call]
