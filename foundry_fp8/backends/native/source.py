"""What an operand is made from, and what is made of it, as torch operators and kept launches take it. Needs no Triton."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

__all__ = ["BOTH", "BY_COLUMNS", "BY_ROWS", "LAYOUTS", "Amaxes", "Layouts", "Source"]


class Source(NamedTuple):
    """The inputs of a kernel's tile producer (:class:`foundry_fp8.kernels.producers.Producer`)."""

    x: Tensor
    up: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    kind: int = 0
    """0: ``x`` as it lies in memory."""


class Layouts(NamedTuple):
    """What is made of an operand in one pass."""

    rows: bool
    """The layout that contracts over columns."""
    columns: bool
    """The transposed one, which contracts over rows."""
    column_sum: bool = False
    """The sum of the hp columns."""


LAYOUTS = {given: Layouts(*given) for given in itertools.product((False, True), repeat=3)}
"""By their fields: a pass of a linear makes no new ones."""

BY_ROWS, BY_COLUMNS, BOTH = Layouts(True, False), Layouts(False, True), Layouts(True, True)

Amaxes = tuple[Tensor | None, Tensor | None, Tensor | None]
"""What one scale a tensor comes from, and where its amax goes: delayed scaling's scale; a tensor whose first element is the amax,
where current scaling has measured it before; a slot that is raised to the amax in place. A plain tuple, which costs the host nothing."""
