"""Transformer Engine's modules under FSDP2, where another module stands in the model in their place.

Cause: from 2.16 on, TE frees FP8 weights between forward and backward under FSDP2 (its issue 2681). It asks FSDP2 for the TE module,
by ``transformer_engine.pytorch.distributed._get_module_fsdp_state``, and keeps the answer in the module's ``_is_fsdp2``; but it is a
converted linear that is in the wrapped model. Remove when TE takes the module to look for.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["tell_about_fsdp2"]


def tell_about_fsdp2(te_module: Any, module: nn.Module) -> None:
    """Give ``te_module`` what it would find if it were in the place of ``module``. Twice is once.

    Raises:
        RuntimeError: This TE asks FSDP2 otherwise.
    """
    if "_is_fsdp2" in te_module.__dict__ or not hasattr(type(te_module), "is_fsdp2"):
        return
    try:
        from transformer_engine.pytorch.distributed import _get_module_fsdp_state
    except ImportError as error:
        raise RuntimeError(
            f"Transformer Engine no longer has _get_module_fsdp_state as foundry_fp8 uses it ({error}), by which its modules know "
            "FSDP2. Install one from 2.4 to 2.20, take backend: native, or adapt foundry_fp8/compat/te_fsdp2.py."
        ) from error
    try:
        _get_module_fsdp_state(module)
        te_module._is_fsdp2 = True
    except RuntimeError:  # its answer for a module that FSDP2 does not know
        te_module._is_fsdp2 = False
    module.__dict__.pop("_te_cached_parent_fsdp_state", None)
