"""Who listens to a module.

Cause: a module keeps its hooks in private dictionaries (``torch/nn/modules/module.py``), and there is no public way to ask whether there are any.
"""

from __future__ import annotations

from torch import nn

__all__ = ["watched"]


def watched(module: nn.Module | None) -> bool:
    """Whether hooks want to see what goes in or out of ``module``; not those whose attribute ``reads_nothing`` is set."""
    if module is None:
        return False
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not getattr(hook, "reads_nothing", False) for hook in hooks)
