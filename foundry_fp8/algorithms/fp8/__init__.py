"""The Composer algorithm ``fp8``. See README.md."""

from foundry_fp8.algorithms.fp8.algorithm import FP8

__all__ = ["FP8"]
