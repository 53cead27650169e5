"""Giving a module another forward by making it an instance of a subclass of its own class.

``torch.nn.utils.parametrize`` and FSDP2's ``fully_shard`` do the same: parameters, names, hooks, ``isinstance`` and what FSDP
holds of the module stay as they are. The class is made from what can be found again by name, so that the module can be copied
and pickled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor, nn

__all__ = ["MakeForward", "fuse", "unfuse"]

MakeForward = Callable[[Any, Any], Callable[..., Tensor]]
"""From a module's class and what else the forward depends on (hashable) to a forward: a function of a module, so that pickle finds it by its name."""


def fuse(module: nn.Module, make: MakeForward, options: Hashable) -> None:
    """Let ``module`` run the forward that ``make`` makes."""
    cls: Any = type(module)
    module.__class__ = _fused_class(cls, make, options)


def unfuse(module: nn.Module) -> None:
    """Give a fused module the class back that it had. Others are left alone."""
    if "_unfused" in type(module).__dict__:
        module.__class__ = type(module).__dict__["_unfused"]


@functools.cache
def _fused_class(cls: Any, make: MakeForward, options: Hashable) -> Any:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced = super(fused, self).__reduce_ex__(protocol)  # type: ignore[arg-type]
        return (_new, (cls, make, options), *reduced[2:]) if type(self) is fused else reduced

    namespace = {
        "forward": make(cls, options),
        "__module__": cls.__module__,
        "__reduce_ex__": reduce,
        "_unfused": cls,
    }
    fused = type(f"Fused{cls.__name__}", (cls,), namespace)
    return fused


def _new(cls: Any, make: MakeForward, options: Hashable) -> Any:
    fused = _fused_class(cls, make, options)
    return fused.__new__(fused)
