"""What an operand is made from, and what is made of it, as torch operators and kept launches take it. Needs no Triton."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import Tensor

from foundry_fp8.kernels.sources import Producer

__all__ = ["BOTH", "BY_COLUMNS", "BY_ROWS", "LAYOUTS", "Amaxes", "Layouts", "Source"]


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

Source = Producer
"""What an operand is made from."""

Amaxes = tuple[Tensor | None, Tensor | None, Tensor | None]
"""What one scale a tensor comes from, and where its amax goes: delayed scaling's scale; a tensor whose first element is the amax,
where current scaling has measured it before; a slot that is raised to the amax in place. A plain tuple, which costs the host nothing."""
