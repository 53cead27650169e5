"""Another all-gather in the hooks by which tensor parallelism prepares a module's input.

Cause: ``parallelize_module`` leaves a forward pre-hook on the module (``torch/distributed/tensor/_api.py``, ``distribute_module``), which gathers by
``_c10d_functional.all_gather_into_tensor``, and has no place for another way. Remove when a plan can say what gathers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundry_fp8.compat.dispatch_mode import TorchDispatchMode

__all__ = ["Gather", "replace_gathers"]

Gather = Callable[[Tensor, dist.ProcessGroup], Tensor | None]
"""Makes ``[ranks * n, ...]`` of each rank's shard ``[n, ...]``; ``None``: torch shall."""


class _Gathers(TorchDispatchMode):
    def __init__(self, gather: Gather) -> None:
        super().__init__()
        self._gather = gather

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = None
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            found = self._gather(args[0], dist.distributed_c10d._resolve_process_group(args[2]))
        return func(*args, **(kwargs or {})) if found is None else found


def replace_gathers(module: nn.Module, choose: Callable[[Any, Tensor], Gather | None]) -> bool:
    """Ask ``choose`` at each call of ``module``, with its input, what gathers for its hooks of tensor parallelism; whether it has such hooks."""

    def prepare(hook: Any, module: nn.Module, inputs: tuple[Any, ...], *kwargs: Any) -> Any:
        gather = None if torch.compiler.is_compiling() or not inputs else choose(module, inputs[0])
        with nullcontext() if gather is None else _Gathers(gather):
            return hook(module, inputs, *kwargs)

    hooks: dict[int, Any] = module._forward_pre_hooks
    own = [key for key, hook in hooks.items() if hook.__module__.startswith("torch.distributed.tensor")]
    for key in own:
        hooks[key] = functools.partial(prepare, hooks[key])
    return bool(own)
