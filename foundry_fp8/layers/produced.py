"""A tensor that is not in memory until somebody reads it: the output of a norm or an activation, before a linear quantises it.

To autograd and to Python it is a tensor like others. A converted linear computes it in its own kernel, of :attr:`Produced.source`; whoever else
reads it (a hook, an adapter, a monitor) gets it written, once, with the bits that the linear quantises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.compat.fresh_view import in_shape
from foundry_fp8.compat.pytree import tree_map
from foundry_fp8.compat.wrapper_tensor import without_function_override, without_memory

__all__ = ["Produced", "in_memory"]

_OF_ITSELF = frozenset({"__get__", "dim", "size", "numel", "stride", "ndimension", "element_size", "is_contiguous", "is_floating_point", "is_complex", "register_hook", "retain_grad", "requires_grad_", "grad", "__hash__"})  # fmt: skip
"""Functions of torch that ask a tensor for its properties, or autograd for its place, and read no element."""
_OF_MEMORY = frozenset(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag"))  # fmt: skip
"""Properties through which somebody may write."""


class Produced(Tensor):
    """See the module.

    Args:
        shape: ``[..., C]``.
        source: What a kernel makes it of, with the input as ``source.x``, ``[R, C]`` in this tensor's dtype.
        write: Makes ``[R, C]`` of the fields of ``source``.

    Attributes:
        made: What linears have made of it, by how: the next one that reads it makes the same.
        readers: The linears that read it so far.
        expected: Those that read its module's output the last time.
        changed: Whether something differentiable was written to it in place.
    """

    source: Any
    made: dict[Any, Any]
    readers: list[weakref.ref[Any]]
    expected: Sequence[weakref.ref[Any]]
    _write: Callable[..., Tensor]
    _plain: Tensor | None
    _versions: Sequence[int]
    _written_by: Any
    changed = False

    def __new__(cls, shape: torch.Size, source: Any, write: Callable[..., Tensor]) -> Produced:
        """Of what is to be written."""
        self: Produced = without_memory(cls, source.x, shape=shape)
        self.source, self._write, self._plain, self.made = source, write, None, {}
        self.readers, self.expected, self._versions = [], (), _versions(source)
        return self

    @property
    def unread(self) -> bool:
        """Whether it is not in memory yet. From then on linears read it there too: somebody may write, and autograd adds gradients up
        in the order in which they ran. Raises ``RuntimeError`` if it can be made no more.
        """
        if self._plain is None and _versions(self.source) != self._versions:
            raise RuntimeError(
                "what a norm or an activation reads (its input, its weight) was changed in place before its output was read. Read the "
                "output before, change a copy, or set algorithms.fp8.fuse: false."
            )
        return self._plain is None

    def plain(self) -> Tensor:
        """It in memory, differentiable whoever reads it first; the same tensor at each call."""
        if self.unread:
            with torch.inference_mode(False):  # and with gradients
                self._plain = _Write.apply(self)  # type: ignore[no-untyped-call]
                self._written_by = self._plain.grad_fn
        return self._plain  # type: ignore[return-value]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Properties as they are; everything else reads it from memory."""
        with without_function_override():  # type: ignore[no-untyped-call]
            of_itself = getattr(func, "__name__", "") in _OF_ITSELF and func not in _OF_MEMORY
            if of_itself and not getattr(args[0], "changed", False):
                return func(*args, **(kwargs or {}))
            out = func(*tree_map(in_memory, args), **tree_map(in_memory, kwargs or {}))
            for x in args:
                if type(x) is Produced and x._plain is not None and x._plain.grad_fn is not x._written_by:
                    x._written_by, x.changed = x._plain.grad_fn, True
                    _Change.apply(x, x._plain)  # type: ignore[no-untyped-call]
            return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What reads it past Python: autograd's own functions."""
        return func(*tree_map(_written, args), **tree_map(_written, kwargs or {}))


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, produced: Produced) -> Tensor:
        return in_shape(produced._write(*produced.source), *produced.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class _Change(torch.autograd.Function):
    """Gives it the history of what was written in its place, for who reads it past Python: autograd's own functions."""

    @staticmethod
    def forward(ctx: Any, produced: Produced, plain: Tensor) -> Produced:
        ctx.mark_dirty(produced)
        return produced

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


def in_memory(value: Any) -> Any:
    """``value``, but a :class:`Produced` written."""
    return value.plain() if type(value) is Produced else value


def _written(value: Any) -> Any:
    if type(value) is not Produced:
        return value
    return value._write(*value.source).view(value.shape) if value.unread else value.plain().detach()


def _versions(source: Sequence[Any]) -> Sequence[int]:
    return [x._version for x in source if isinstance(x, Tensor) and not x.is_inference()]
