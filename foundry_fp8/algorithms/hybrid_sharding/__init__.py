"""The Composer algorithm ``hybrid_sharding``. See README.md."""

from foundry_fp8.algorithms.hybrid_sharding.algorithm import HybridSharding

__all__ = ["HybridSharding"]
