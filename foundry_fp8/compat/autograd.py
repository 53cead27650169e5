"""Whether a forward is being run inside a backward, that is, by activation checkpointing.

Cause: torch has no public way to ask. ``torch.utils.checkpoint`` itself asks through ``_current_graph_task_id``
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/utils/checkpoint.py), which is -1 outside of a backward.
Remove when torch offers a public call.
"""

from __future__ import annotations

import torch

__all__ = ["inside_backward"]

if not hasattr(torch._C, "_current_graph_task_id"):
    raise RuntimeError(
        f"torch {torch.__version__} no longer has torch._C._current_graph_task_id, by which foundry_fp8 tells a recompute "
        "from a first forward. Install a torch from 2.7 to 2.11, or adapt foundry_fp8/compat/autograd.py."
    )


def inside_backward() -> bool:
    """True while the autograd engine runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1
