"""A run as the table of clashes sees it: made by a trainer of what it was given, and by the commands of a YAML."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from foundry_fp8.activations.checkpointing.apply import ActivationCheckpointingConfig
from foundry_fp8.activations.compression.apply import ActivationCompressionConfig
from foundry_fp8.activations.fused_head.apply import FusedHeadConfig
from foundry_fp8.config import Config, from_mapping
from foundry_fp8.distributed.compression.config import CompressionConfig
from foundry_fp8.distributed.fsdp_settings import FSDPSettings
from foundry_fp8.distributed.hybrid_sharding.apply import HybridShardingConfig
from foundry_fp8.models.mus.apply import UnitScalingConfig
from foundry_fp8.surgery.fp8_config import FP8Config

__all__ = ["CONFIGS", "Run", "in_plan", "parse_algorithms"]

CONFIGS: Mapping[str, type[Config]] = {
    "fp8": FP8Config,
    "activation_checkpointing": ActivationCheckpointingConfig,
    "activation_compression": ActivationCompressionConfig,
    "compressed_communication": CompressionConfig,
    "fused_head": FusedHeadConfig,
    "hybrid_sharding": HybridShardingConfig,
    "unit_scaling": UnitScalingConfig,
}
"""What each algorithm of this package reads its part of a YAML into."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of a run. A trainer fills in what the algorithm that asks is about; a YAML is read as a whole."""

    trainer: Literal["composer", "transformers"] = "composer"
    name: str | None = None
    precision: str = "amp_bf16"
    """In Composer's words."""
    ranks: int = 1
    replicate: int = 1
    """Copies of the model."""
    shard: int = 1
    """Ranks that share one of them."""
    fsdp: FSDPSettings | None = None
    tensor_parallel: bool = False
    parallel_layers: tuple[str, ...] = ()
    """Converted layers that are in the plan of tensor parallelism."""
    compiled: bool = False
    train_metrics: bool = False
    """Whether metrics read the logits of training batches."""
    flash_loss: bool = False
    """Whether the model's loss is flash-attention's cross-entropy."""
    te_layers: bool = False
    """Whether the model is made of Transformer Engine's layers."""
    guarded: bool = False
    zero_stage: int | None = None
    """DeepSpeed's."""
    copied_to: int = 1
    """GPUs of one process, among which ``nn.DataParallel`` copies the model."""
    fp8: FP8Config | None = None
    activation_checkpointing: ActivationCheckpointingConfig | None = None
    activation_compression: ActivationCompressionConfig | None = None
    compressed_communication: CompressionConfig | None = None
    fused_head: FusedHeadConfig | None = None
    hybrid_sharding: HybridShardingConfig | None = None
    unit_scaling: UnitScalingConfig | None = None

    @property
    def parallel_named(self) -> str:
        """``parallel_layers`` in a message."""
        return (
            f"{len(self.parallel_layers)} converted layers ("
            + ", ".join(self.parallel_layers[:3])
            + ", ..." * (len(self.parallel_layers) > 3)
            + ")"
        )

    @property
    def converts(self) -> FP8Config | None:
        """``fp8``, unless it is switched off."""
        return self.fp8 if self.fp8 is not None and self.fp8.enabled else None


def parse_algorithms(section: Mapping[str, Mapping[str, Any] | None] | None) -> dict[str, Any]:
    """The configurations of those algorithms of a YAML's ``algorithms`` that are this package's.

    Raises:
        ConfigError: An option that is unknown or has a value that it cannot have.
    """
    return {
        name: from_mapping(CONFIGS[name], options or {}, f"algorithms.{name}")
        for name, options in (section or {}).items()
        if name in CONFIGS
    }


def in_plan(converted: Iterable[str], plan: Iterable[str]) -> tuple[str, ...]:
    """Those of the layers ``converted`` that the globs of a tensor-parallel ``plan`` name: they become DTensors, which FP8 layers do not take."""
    globs = list(plan)
    return tuple(name for name in converted if any(fnmatch.fnmatch(name, glob) for glob in globs))
