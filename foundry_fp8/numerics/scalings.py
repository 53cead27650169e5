"""How an operand's elements share scales, as a recipe says it: what its backends implement, and the definition of each.

A recipe names one for each operand and dimension (:meth:`~foundry_fp8.numerics.recipes.Recipe.scaling`). A backend has a file or a
function for each class it can run, and refuses the others by name.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from foundry_fp8.numerics.formats import Float8Format, e8m0_decode, e8m0_round_up
from foundry_fp8.numerics.quantize import (
    Quantized,
    amax_of,
    quantize_block,
    quantize_constant,
    quantize_mx,
    quantize_rows,
    quantize_tensor,
    scale_from_amax,
)

__all__ = ["Blocks", "Constant", "MXBlocks", "OneScale", "Rows", "Scaling"]


@dataclasses.dataclass(frozen=True)
class Scaling(abc.ABC):
    """Which elements share a scale, and where it comes from."""

    kind: ClassVar[str]
    """What a backend looks it up by."""
    measures_amax: ClassVar[bool] = True
    """Whether an amax is taken, in which Inf would show."""
    scale_dtype: ClassVar[torch.dtype] = torch.float32
    """Of the scales in a file."""
    transforms = False
    """Whether what it makes stands for a transform of what it was given."""

    @abc.abstractmethod
    def quantize(self, x: Tensor, fmt: Float8Format, scale: Tensor | None = None) -> Quantized:
        """The definition: exact on any device.

        Args:
            x: ``[R, C]``, hp.
            fmt: The number format.
            scale: 0-d float32: a scale that is known before, for :class:`OneScale`.
        """

    @property
    def keeps_codes(self) -> bool:
        """Whether what it made is quantised to itself: its scales are powers of two."""
        return getattr(self, "power_2", False)

    def of_pass(self, number: int) -> Scaling:
        """As it is in the pass of that ``number``; another one where it rounds at random."""
        return self

    def pack(self, q: Quantized) -> tuple[Tensor, Tensor]:
        """Data and scales as they are kept for backward."""
        return q.data, q.gemm_scale

    def unpack(self, data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Data and scales of what :meth:`pack` was given."""
        return data, scale


@dataclasses.dataclass(frozen=True)
class OneScale(Scaling):
    """One scale for the tensor: given (delayed), or from its own amax (current)."""

    kind = "tensor"
    power_2: bool = False
    given: bool = False

    def scale(self, amax: Tensor, fmt: Float8Format, given: Tensor | None) -> Tensor:
        """The one that was given, or that of ``amax``; a scale that is missing is no reason to measure one."""
        if self.given or given is not None:
            assert given is not None
            return given
        return scale_from_amax(amax, fmt, power_2=self.power_2)

    def quantize(self, x: Tensor, fmt: Float8Format, scale: Tensor | None = None) -> Quantized:
        """See :meth:`Scaling.quantize`."""
        amax = amax_of(x)
        return quantize_tensor(x, self.scale(amax, fmt, scale), fmt, amax)


@dataclasses.dataclass(frozen=True)
class Rows(Scaling):
    """One scale for all that a GEMM adds up: along rows (``along`` 1) or columns (0)."""

    kind = "row"
    keeps_codes = False  # along one dimension alone
    along: int
    power_2: bool = False

    def quantize(self, x: Tensor, fmt: Float8Format, scale: Tensor | None = None) -> Quantized:
        """See :meth:`Scaling.quantize`."""
        return quantize_rows(x, fmt, along=self.along, power_2=self.power_2)


@dataclasses.dataclass(frozen=True)
class Blocks(Scaling):
    """One float32 scale a block of rows and columns."""

    kind = "block"
    block: tuple[int, int]
    power_2: bool = True

    def quantize(self, x: Tensor, fmt: Float8Format, scale: Tensor | None = None) -> Quantized:
        """See :meth:`Scaling.quantize`."""
        return quantize_block(x, self.block, fmt, power_2=self.power_2)


@dataclasses.dataclass(frozen=True)
class MXBlocks(Scaling):
    """One E8M0 scale a block."""

    kind = "mx"
    keeps_codes = True
    scale_dtype = torch.float8_e8m0fnu
    block: tuple[int, int]

    def quantize(self, x: Tensor, fmt: Float8Format, scale: Tensor | None = None) -> Quantized:
        """See :meth:`Scaling.quantize`."""
        return quantize_mx(x, self.block, fmt)

    def pack(self, q: Quantized) -> tuple[Tensor, Tensor]:
        """A byte a scale."""
        return q.data, e8m0_round_up(q.gemm_scale)

    def unpack(self, data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Scaling.unpack`."""
        return data, e8m0_decode(scale)


@dataclasses.dataclass(frozen=True)
class Constant(Scaling):
    """A number that the recipe knows, a power of two; nothing is measured."""

    kind = "constant"
    keeps_codes = True
    measures_amax = False
    value: float

    def quantize(self, x: Tensor, fmt: Float8Format, scale: Tensor | None = None) -> Quantized:
        """See :meth:`Scaling.quantize`."""
        return quantize_constant(x, self.value, fmt)
