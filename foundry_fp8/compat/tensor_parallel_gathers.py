"""Another all-gather in the hooks by which tensor parallelism prepares a module's input.

Cause: ``parallelize_module`` leaves a forward pre-hook on the module, whose layouts nobody can ask
(``torch/distributed/tensor/_api.py``, ``distribute_module``), and which gathers by ``_c10d_functional.all_gather_into_tensor``. Remove when a
plan can name what gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.dispatch_mode import TorchDispatchMode
from foundry_fp8.config.versions import moved

__all__ = ["Choose", "Gather", "all_gather", "all_reduce_max", "replace_gathers"]

Gather = Callable[[Tensor, int, str], Tensor | None]
"""Of this rank's shard ``[n, ...]``, the number of ranks and their group's name: ``[ranks * n, ...]``; ``None``: by torch."""
Choose = Callable[[Any, tuple[Any, ...]], Gather | None]
"""Of a module that is called, and its inputs: what gathers them; ``None``: torch."""

try:
    _OPERATORS = torch.ops._c10d_functional
    _GATHER = _OPERATORS.all_gather_into_tensor.default
except AttributeError as error:
    raise moved(f"no longer has _c10d_functional.all_gather_into_tensor ({error})", "tensor_parallel_gathers") from error


class _Gathers(TorchDispatchMode):
    def __init__(self, gather: Gather) -> None:
        super().__init__()
        self._gather = gather

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self._gather(*args) if func is _GATHER else None
        return func(*args, **(kwargs or {})) if found is None else found


def replace_gathers(module: nn.Module, choose: Choose) -> bool:
    """Ask ``choose`` at each call of ``module`` what gathers for its hooks of tensor parallelism; whether it has such hooks."""
    hooks: dict[int, Any] = module._forward_pre_hooks
    own = [key for key, hook in hooks.items() if _of_tensor_parallelism(hook)]
    for key in own:
        hooks[key] = _replacing(hooks[key], choose)
    return bool(own)


def _of_tensor_parallelism(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.tensor.")


def _replacing(hook: Callable[..., Any], choose: Choose) -> Callable[..., Any]:
    def prepare(module: nn.Module, inputs: tuple[Any, ...], *kwargs: Any) -> Any:
        gather = None if torch.compiler.is_compiling() else choose(module, inputs)
        with nullcontext() if gather is None else _Gathers(gather):
            return hook(module, inputs, *kwargs)

    return prepare


def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """``[ranks * n, ...]`` of each rank's ``x``, ``[n, ...]``."""
    return _OPERATORS.wait_tensor(_GATHER(x, ranks, group))


def all_reduce_max(x: Tensor, group: str) -> Tensor:
    """The largest of each rank's ``x``."""
    return _OPERATORS.wait_tensor(_OPERATORS.all_reduce(x, "max", group))
