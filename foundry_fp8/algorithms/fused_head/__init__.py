"""The Composer algorithm ``fused_head``. See README.md."""

from foundry_fp8.algorithms.fused_head.algorithm import FusedHead

__all__ = ["FusedHead"]
