"""Which results a recompute by selective activation checkpointing takes from its cache instead of running them.

Cause: a module's forward runs again under selective checkpointing, but the operators that the policy saved do not; torch
keeps what it saved in a private dispatch mode (``torch.utils.checkpoint._CachedTorchDispatchMode.storage``, torch 2.7 to
2.11) and has no public way to ask. Remove when it has one.
"""

from __future__ import annotations

from typing import Any

import torch.utils.checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["cached_results"]

_MODE: Any = getattr(torch.utils.checkpoint, "_CachedTorchDispatchMode", None)

if _MODE is None:
    raise RuntimeError(
        f"torch {torch.__version__} no longer has torch.utils.checkpoint._CachedTorchDispatchMode, by which foundry_fp8 "
        "tells what a selective recompute re-runs. Install a torch from 2.7 to 2.11, or adapt "
        "foundry_fp8/compat/selective_checkpoint.py."
    )


def cached_results(operators: tuple[str, ...]) -> int:
    """Results still in the caches that are active, of ``aten`` operators whose name starts with one of ``operators``.

    Fewer after a module's forward than before it: the module took that operator's result from the cache. 0 where no
    selective checkpointing runs.
    """
    return sum(
        len(results)
        for mode in _get_current_dispatch_mode_stack()
        if isinstance(mode, _MODE)
        for operator, results in mode.storage.items()
        if operator.__name__.startswith(operators)
    )
