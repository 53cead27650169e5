"""Tensors without values, for dry runs.

Cause: ``FakeTensor`` and ``FakeTensorMode`` are in ``torch._subclasses.fake_tensor``, and which mode is entered says
``torch._guards.active_fake_mode``; torch documents them and has no public module for them. Remove when it has.
"""

from __future__ import annotations

import torch

from foundry_fp8.config.versions import moved

try:
    from torch._guards import active_fake_mode
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        unset_fake_temporarily,
    )
except ImportError as error:
    what = "torch._subclasses.fake_tensor and torch._guards.active_fake_mode"
    raise moved(f"no longer has {what} as foundry_fp8 uses them ({error})", "fake_tensor") from error

__all__ = [
    "FLASH_ATTENTION", "NEEDS_VALUES", "FakeTensor", "FakeTensorMode", "dry_run", "unset_fake_temporarily",
]  # fmt: skip

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What is raised where an operator's result depends on values."""

FLASH_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
"""What ``F.scaled_dot_product_attention`` of fake tensors runs, forward and backward; their names are private."""


def dry_run() -> bool:
    """Whether new tensors have no values here: a ``FakeTensorMode`` is entered."""
    return active_fake_mode() is not None
