"""A tensor that holds others in its place: looks like one in high precision, and is made one by whoever reads it.

Cause: torch's wrapper subclasses (``torch.Tensor._make_wrapper_subclass``, ``__torch_dispatch__``) are how torchao and DTensor do this; of what they need the
constructor, the switch that keeps results from becoming subclasses and an operator's schema have no public names
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/_tensor.py). ``module.to``, ``deepcopy``, ``torch.compile`` and checkpoints know such tensors by
``__tensor_flatten__``. Remove when there are public names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_fp8.compat.pytree import tree_map

__all__ = ["WrapperTensor"]

_detach, _clone, _to_copy, _copy_ = (
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.copy_.default,
)


class WrapperTensor(Tensor):
    """Detaching, copying and moving give another of these; every other operator gets what :meth:`unpacked` gives.

    What is written to it in place goes through :meth:`write`. A subclass has a constructor whose arguments are ``parts`` tensors by name, then
    :meth:`meta`, then the dtype.
    """

    parts: tuple[str, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def wrapper_like(cls, part: Tensor, dtype: torch.dtype) -> Any:
        """For ``__new__``: a tensor of the shape and device of ``part`` and of ``dtype``, without memory of its own."""
        return torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=dtype, device=part.device)  # type: ignore[attr-defined]

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The values, a plain tensor."""
        raise NotImplementedError

    def write(self, value: Tensor) -> None:
        """Take the values of the plain ``value``, of the same shape and device."""
        raise NotImplementedError

    def meta(self) -> tuple[Any, ...]:
        """What the constructor takes beside the tensors and the dtype."""
        raise NotImplementedError

    @property
    def data(self) -> Tensor:
        """As of any tensor: without autograd's notes, with the same memory. What is assigned is written."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.detach().copy_(value)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.parts), (*self.meta(), self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Any:
        return cls(*(inner[name] for name in cls.parts), *meta)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        one = args[0] if args else None
        if isinstance(one, cls):
            held = [getattr(one, name) for name in one.parts]
            if func is _detach:
                return cls(*held, *one.meta(), one.dtype)
            if func is _clone:
                return cls(*(part.clone() for part in held), *one.meta(), one.dtype)
            dtype, device = kwargs.get("dtype") or one.dtype, kwargs.get("device")
            if func is _to_copy and dtype.is_floating_point:
                moved = (part.to(device=device, copy=True) for part in held)
                return cls(*moved, *one.meta(), dtype)
            if func is _copy_:
                value = args[1].unpacked(args[1].dtype) if isinstance(args[1], cls) else args[1]
                one.write(value.to(one.device).expand(one.shape))
                return one
        plain_args, plain_kwargs = tree_map(
            lambda x: x.unpacked(x.dtype) if isinstance(x, cls) else x, (args, kwargs)
        )
        out = func(*plain_args, **plain_kwargs)
        if isinstance(one, cls) and func._schema.is_mutable:
            one.write(plain_args[0])
            return one
        return out
