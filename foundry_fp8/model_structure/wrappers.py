"""Modules behind wrappers, and putting a wrapper around a module that sits anywhere in a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.compat.checkpoint_wrapper import CheckpointWrapper
from foundry_fp8.model_structure.names import clean_name

__all__ = [
    "checkpoint_wrappers", "has_forward", "is_sharded", "modules_by_clean_name", "names_in_forward", "own_class",
    "own_forward", "replace_everywhere", "replace_module", "without_ddp",
]  # fmt: skip


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called: an ``nn.ModuleList`` cannot, its owner calls what is in it, past any hook of the list."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def without_ddp(model: nn.Module) -> nn.Module:
    """The model inside DDP, or ``model``: its own submodule called ``module`` (``ComposerClassifier`` has one) is no wrapper's."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP1 or FSDP2 wraps ``model`` or parts of it."""
    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())


def modules_by_clean_name(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """``{clean name: (full name, module)}``; of a wrapper and what it wraps, the innermost."""
    return {clean_name(name): (name, module) for name, module in model.named_modules()}


def own_class(module: nn.Module | type[nn.Module]) -> type[nn.Module]:
    """The class that ``module`` was made with: FSDP2 and fused forms make it an instance of a subclass."""
    cls = module if isinstance(module, type) else type(module)
    while "_unfused" in cls.__dict__ or (FSDPModule in cls.__bases__ and len(cls.__bases__) == 2):
        cls = cls.__dict__["_unfused"] if "_unfused" in cls.__dict__ else cls.__bases__[1]
    return cls


def own_forward(module: nn.Module) -> Any:
    """The forward of the class of ``module``, under its decorators."""
    return inspect.unwrap(type(module).forward)


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """The globals and attributes that the forward of ``module`` uses."""
    code = getattr(own_forward(module), "__code__", None)
    return code.co_names if code is not None else ()


def checkpoint_wrappers(model: nn.Module) -> Iterator[tuple[str, CheckpointWrapper]]:
    """Every checkpointed module as ``(clean name, wrapper)``, whoever wrapped it."""
    for name, module in model.named_modules():
        if isinstance(module, CheckpointWrapper):
            yield clean_name(name), module


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put ``new`` where ``model`` holds the submodule with the full name ``name``."""
    parent_name, _, leaf = name.rpartition(".")
    model.get_submodule(parent_name)._modules[leaf] = new


def replace_everywhere(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``model`` holds the submodule ``old``: a block may stand in several places. ``new`` itself may hold it too."""
    for parent in list(model.modules()):
        for leaf, child in parent._modules.items():
            if child is old and parent is not new:
                parent._modules[leaf] = new
