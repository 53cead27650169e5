"""How a tensor lies in memory, and rounding it without a copy where it lies densely."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from foundry_fp8.activations.compression.packing import pack, unpack
from foundry_fp8.numerics.packed import Packed, PackFormat

__all__ = ["Flat", "Rounded"]


@dataclasses.dataclass(frozen=True)
class Flat:
    """A tensor as one row of elements, and how to lay it out again.

    Attributes:
        base: The tensor with expanded dimensions (stride 0) cut to 1.
        dense: Whether its elements fill one stretch of memory, each place once, in whatever order: then the row is that
            memory, and strides come back.
        expanded: The shape to expand to again, if it was cut.
    """

    base: Tensor
    dense: bool
    expanded: Sequence[int] | None

    @classmethod
    def of(cls, x: Tensor) -> Flat:
        """``x`` must need no gradient."""
        expanded = None
        if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
            cut = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
            x, expanded = x[cut], tuple(x.shape)
        return cls(x, _dense(x), expanded)

    @property
    def layout(self) -> object:
        """Equal for tensors at one address that have the same row."""
        return self.base.numel() if self.dense else (tuple(self.base.shape), self.base.stride())

    def pack(self, fmt: PackFormat, *, nonzero: bool) -> Packed:
        """See :func:`.packing.pack`; blocks stay within rows of the last dimension where that is the inner one."""
        base = self.base
        row = base.as_strided((base.numel(),), (1,)) if self.dense else base.contiguous().view(-1)
        inner = base.dim() > 0 and (not self.dense or base.stride(-1) == 1)
        return pack(row, fmt, row=base.shape[-1] if inner else 0, nonzero=nonzero)

    def rounded(self, packed: Packed) -> Rounded:
        """What to keep of the tensor instead of itself."""
        stride = self.base.stride() if self.dense else None
        return Rounded(packed, tuple(self.base.shape), stride, self.expanded)


@dataclasses.dataclass(frozen=True)
class Rounded:
    """A packed tensor, which others may share, and its layout; see :class:`Flat`."""

    packed: Packed
    size: Sequence[int]
    stride: Sequence[int] | None
    expanded: Sequence[int] | None

    def tensor(self) -> Tensor:
        """The values in their old layout."""
        row = unpack(self.packed)
        x = row.view(self.size) if self.stride is None else row.as_strided(self.size, self.stride)
        return x if self.expanded is None else x.expand(self.expanded)


def _dense(x: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((st, sz) for sz, st in zip(x.shape, x.stride(), strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True
