"""What autograd's engine is doing, and how it numbers its nodes.

Cause: torch has no public way to ask. ``torch.utils.checkpoint`` itself asks through ``_current_graph_task_id``, which is -1
outside of a backward (https://github.com/pytorch/pytorch/blob/v2.7.0/torch/utils/checkpoint.py), and torch's tracing through
``_get_sequence_nr`` and ``Node._sequence_nr`` (``torch/csrc/autograd/function.h``: a thread numbers the nodes it makes; leaves
have the largest number there is). Remove when torch offers public calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from foundry_fp8.config.versions import moved

__all__ = [
    "apply_untransformed", "backward_number", "batched", "inside_backward", "maybe_transformed", "newest_node",
    "node_number", "running_node", "transformed",
]  # fmt: skip


def _missing() -> str | None:
    """Which of the calls below this torch does not have."""
    for name in ("_current_graph_task_id", "_current_autograd_node"):
        if not hasattr(torch._C, name):
            return f"torch._C.{name}"
    with torch.enable_grad():
        node: Any = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True).neg().grad_fn
    if not hasattr(node, "_sequence_nr"):
        return "Node._sequence_nr"
    # The number that the next node gets.
    counter = getattr(torch._C._autograd, "_get_sequence_nr", lambda: None)
    if counter() != node._sequence_nr() + 1:
        return "torch._C._autograd._get_sequence_nr"
    keys = ("_dispatch_tls_local_include_set", "_vmapmode_increment_nesting", "_vmapmode_decrement_nesting")
    return next((f"torch._C.{name}" for name in keys if not hasattr(torch._C, name)), None)


if (_name := _missing()) is not None:
    raise moved(
        f"no longer has {_name}, or it means something else. By it foundry_fp8 distinguishes a recompute from a first forward, and of "
        "which, and which operator saves a tensor",
        "autograd",
    )


def maybe_transformed() -> bool:
    """True inside of ``torch.func``'s transforms and of forward-mode differentiation; costs a pass next to nothing."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


_keys = torch._C._dispatch_tls_local_include_set
_none = _keys().raw_repr()
torch._C._vmapmode_increment_nesting()
_VMAP_MODE = _keys().raw_repr() & ~_none
torch._C._vmapmode_decrement_nesting()


def batched() -> bool:
    """True inside of what ``is_grads_batched`` makes of a backward. A fifth of what asking by the key's name costs."""
    return bool(_keys().raw_repr() & _VMAP_MODE)


def transformed() -> bool:
    """True inside of ``torch.func``'s transforms, of the one that is ``is_grads_batched``, and of forward-mode differentiation."""
    return maybe_transformed() or batched()


def inside_backward() -> bool:
    """True while the autograd engine runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_number() -> int | None:
    """The number of the backward that runs in this thread, which no other has; ``None`` outside of one."""
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


def newest_node() -> int:
    """The number of the node that this thread made last: in a saved-tensor hook, the one that saves."""
    return torch._C._autograd._get_sequence_nr() - 1


def running_node() -> int | None:
    """The number of the node whose backward runs in this thread: in a recompute, of one that the first forward made.

    ``None`` outside of a backward, and in the hooks that run between two nodes.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else node_number(node)


def node_number(node: Any) -> int:
    """The number of a node, larger than any other's for a leaf."""
    number: int = node._sequence_nr()
    return number


def apply_untransformed(function: Any, *args: Any) -> Any:
    """``function.apply(*args)`` where no transform of ``torch.func`` runs, as has been asked: asking again takes 2 of its 7 microseconds."""
    return super(torch.autograd.Function, function).apply(*args)
