"""Tensors without values, for dry runs.

Cause: ``FakeTensor`` and ``FakeTensorMode`` are in ``torch._subclasses.fake_tensor``; torch documents them and has no public module
for them. Remove when it has.
"""

from __future__ import annotations

import torch

try:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        unset_fake_temporarily,
    )
except ImportError as error:
    raise RuntimeError(
        f"torch {torch.__version__} no longer has torch._subclasses.fake_tensor as foundry_fp8 uses it ({error}). Install a torch "
        "from 2.7 to 2.11, or adapt foundry_fp8/compat/fake_tensor.py."
    ) from error

__all__ = ["NEEDS_VALUES", "FakeTensor", "FakeTensorMode", "unset_fake_temporarily"]

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""What is raised where an operator's result depends on values."""
