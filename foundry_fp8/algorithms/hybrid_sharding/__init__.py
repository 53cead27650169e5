"""HSDP under Composer. ``hybrid_degrees`` needs torch alone; the algorithm needs Composer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foundry_fp8.algorithms.hybrid_sharding.functional import (
    HybridShardingConfig,
    hybrid_degrees,
    hybrid_mesh,
    state_bytes,
)

if TYPE_CHECKING:
    from foundry_fp8.algorithms.hybrid_sharding.algorithm import HybridSharding

__all__ = ["HybridSharding", "HybridShardingConfig", "hybrid_degrees", "hybrid_mesh", "state_bytes"]


def __getattr__(name: str) -> Any:
    if name == "HybridSharding":
        from foundry_fp8.algorithms.hybrid_sharding.algorithm import HybridSharding

        return HybridSharding
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
