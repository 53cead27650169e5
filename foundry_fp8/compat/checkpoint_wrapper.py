"""The module that puts an activation checkpoint around another, which Composer and FSDP recognise.

Cause: it is in ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper``; torch has no public one. Remove when it has.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from foundry_fp8.config.versions import moved

try:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointWrapper,
        checkpoint_wrapper,
    )
except ImportError as error:
    what = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    raise moved(f"no longer has {what} as foundry_fp8 uses it ({error})", "checkpoint_wrapper") from error

__all__ = ["CheckpointWrapper", "checkpoint_wrapper", "keywords_of", "wrapped_module"]


def keywords_of(wrapper: CheckpointWrapper) -> dict[str, Any]:
    """The keywords that ``wrapper`` was made with for its checkpoint function."""
    return getattr(wrapper.checkpoint_fn, "keywords", {})


def wrapped_module(wrapper: CheckpointWrapper) -> nn.Module:
    """The module that ``wrapper`` is around."""
    module: nn.Module = wrapper._checkpoint_wrapped_module
    return module
