"""FP8 linear layers. ``apply_fp8`` needs torch alone; the algorithm ``FP8`` needs Composer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foundry_fp8.algorithms.fp8.functional import FP8Config, apply_fp8

if TYPE_CHECKING:
    from foundry_fp8.algorithms.fp8.algorithm import FP8

__all__ = ["FP8", "FP8Config", "apply_fp8"]


def __getattr__(name: str) -> Any:
    if name == "FP8":
        from foundry_fp8.algorithms.fp8.algorithm import FP8

        return FP8
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
