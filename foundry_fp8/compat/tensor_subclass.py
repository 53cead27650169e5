"""What a tensor of a class of our own is made of.

Cause: torch documents ``__torch_function__`` and ``__torch_dispatch__``, and not the constructor of a tensor without memory, the guard under
which a function runs past the class, nor its own ``tree_map``. Remove when they have public names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_fp8.config.tested import TORCHES

try:
    from torch._C import DisableTorchFunctionSubclass as without_function_override
    from torch.utils._pytree import tree_map

    Tensor._make_wrapper_subclass  # type: ignore[attr-defined]  # noqa: B018
except (ImportError, AttributeError) as error:
    raise RuntimeError(
        f"torch {torch.__version__} no longer has _make_wrapper_subclass, DisableTorchFunctionSubclass or tree_map ({error}), of which "
        f"foundry_fp8 makes tensors that are not in memory yet. {TORCHES}, or adapt foundry_fp8/compat/tensor_subclass.py."
    ) from error

__all__ = ["as_class", "tree_map", "without_function_override"]


def as_class(cls: type[Tensor], shape: torch.Size, like: Tensor) -> Any:
    """A tensor of ``cls`` without memory, in the dtype and on the device of ``like``."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
