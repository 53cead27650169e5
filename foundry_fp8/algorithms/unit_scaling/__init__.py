"""The Composer algorithm ``unit_scaling``. See README.md."""

from foundry_fp8.algorithms.unit_scaling.algorithm import UnitScaling

__all__ = ["UnitScaling"]
