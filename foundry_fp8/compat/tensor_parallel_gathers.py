"""Another all-gather in the hook by which ``ColwiseParallel`` prepares a linear's input.

Cause: ``parallelize_module`` leaves a forward pre-hook, a lambda around the style's function and layouts (``torch/distributed/tensor/_api.py``,
``distribute_module``), which gathers by ``_c10d_functional.all_gather_into_tensor``, and has no place for another way. Remove when it has.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from foundry_fp8.compat.dispatch_mode import TorchDispatchMode

__all__ = ["Gather", "replace_gathers"]

Gather = Callable[[Tensor, dist.ProcessGroup], Tensor]
"""Makes ``[ranks * n, ...]`` of each rank's shard ``[n, ...]``."""


class _Gathers(TorchDispatchMode):
    def __init__(self, gather: Gather) -> None:
        super().__init__()
        self._gather = gather

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            return self._gather(args[0], dist.distributed_c10d._resolve_process_group(args[2]))
        return func(*args, **(kwargs or {}))


def replace_gathers(module: nn.Module, choose: Callable[[Any, Tensor], Gather | None]) -> bool:
    """Ask ``choose`` at each call of ``module``, with its input, what gathers (``None``: torch); whether a hook of ``ColwiseParallel`` does."""

    def prepare(hook: Any, module: nn.Module, inputs: tuple[Any, ...], *kwargs: Any) -> Any:
        gather = None if torch.compiler.is_compiling() or not inputs else choose(module, inputs[0])
        with nullcontext() if gather is None else _Gathers(gather):
            return hook(module, inputs, *kwargs)

    hooks: dict[int, Any] = module._forward_pre_hooks
    for key, hook in list(hooks.items()):
        style = inspect.getclosurevars(hook).nonlocals.get("input_fn") if inspect.isfunction(hook) else None
        match getattr(style, "args", None):
            case ((Shard(),), (Replicate(),)):
                hooks[key] = functools.partial(prepare, hook)
                return True
    return False
