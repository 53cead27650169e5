"""Who listens to a module.

Cause: a module keeps its hooks in private dictionaries, and torch those of all modules (``torch/nn/modules/module.py``); there is no public
way to ask whether there are any.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

__all__ = ["watched"]

_OF_ALL = (
    torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks,
)  # fmt: skip


def watched(module: nn.Module | None) -> bool:
    """Whether hooks of all modules, or its own, want to see what goes in or out of ``module``; not own ones that have ``reads_nothing`` set."""
    if module is None:
        return False
    if module._backward_hooks or module._backward_pre_hooks or any(_OF_ALL):
        return True
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not getattr(hook, "reads_nothing", False) for hook in hooks)
