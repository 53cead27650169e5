"""What imports Triton, imported at its first use: without it models can still be planned, copied and unpickled."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["late"]


@functools.cache
def late() -> Any:
    """This package, with its modules that import Triton; an import statement would take 1 us of each pass of a linear."""
    from foundry_fp8.backends import native
    from foundry_fp8.backends.native import ahead, linear, ops, scaling

    assert ahead and linear and ops and scaling
    return native
