"""Seeing every operator that runs.

Cause: ``TorchDispatchMode`` is in ``torch.utils._python_dispatch``; torch documents it and has no public module for it. Remove when
it has.
"""

from __future__ import annotations

import torch

try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    raise RuntimeError(
        f"torch {torch.__version__} no longer has torch.utils._python_dispatch.TorchDispatchMode, with which foundry_fp8 counts "
        "bytes and operators. Install a torch from 2.7 to 2.11, or adapt foundry_fp8/compat/dispatch_mode.py."
    ) from error

__all__ = ["TorchDispatchMode"]
