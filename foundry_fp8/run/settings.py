"""A run as the table of clashes sees it: made by a trainer of what it was given, and by the commands of a YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from foundry_fp8.activations.checkpointing.apply import ActivationCheckpointingConfig
from foundry_fp8.activations.compression.apply import ActivationCompressionConfig
from foundry_fp8.activations.fused_head.apply import FusedHeadConfig
from foundry_fp8.config import Config, from_mapping
from foundry_fp8.distributed.compression.config import CompressionConfig
from foundry_fp8.distributed.hybrid_sharding.apply import HybridShardingConfig
from foundry_fp8.models.unit_scaling import UnitScalingConfig
from foundry_fp8.surgery.fp8_config import FP8Config
from foundry_fp8.surgery.timing import Moment

__all__ = ["Run", "parse_algorithms"]

CONFIGS: Mapping[str, type[Config]] = {
    "fp8": FP8Config,
    "activation_checkpointing": ActivationCheckpointingConfig,
    "activation_compression": ActivationCompressionConfig,
    "compressed_communication": CompressionConfig,
    "fused_head": FusedHeadConfig,
    "hybrid_sharding": HybridShardingConfig,
    "unit_scaling": UnitScalingConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of a run. A trainer fills in what the algorithm that asks is about; a YAML is read as a whole."""

    trainer: Literal["composer", "transformers", "torchtitan", "loop"] = "composer"
    name: str | None = None
    precision: str = "amp_bf16"  # in Composer's words
    ranks: int = 1
    replicate: int = 1  # copies of the model
    shard: int = 1  # ranks that share one of them
    fsdp: Any = None  # Composer's FSDPConfig or FSDP2Config
    tensor_parallel: int = 0  # ranks that share every matrix; 0 without tensor parallelism
    length: Moment | None = None  # as far as it is known
    wrapped: bool = False  # the model is compiled, or in DDP or FSDP, before it is converted
    compiled: bool = False
    train_metrics: bool = False  # which read the logits of training batches
    flash_loss: bool = False  # flash-attention's cross-entropy
    te_layers: bool = False  # Transformer Engine's, in the model's config
    keeps_codes: bool = False  # frozen weights are a checkpoint's FP8 codes
    guarded: bool = False
    zero_stage: int | None = None  # DeepSpeed's
    copied_to: int = 1  # GPUs of one process, among which nn.DataParallel copies the model
    device: torch.device | None = None  # of this rank
    callbacks: Sequence[str] = ()  # their classes
    log: str = ""  # the run log's path
    fp8: FP8Config | None = None
    activation_checkpointing: ActivationCheckpointingConfig | None = None
    activation_compression: ActivationCompressionConfig | None = None
    compressed_communication: CompressionConfig | None = None
    fused_head: FusedHeadConfig | None = None
    hybrid_sharding: HybridShardingConfig | None = None
    unit_scaling: UnitScalingConfig | None = None

    @property
    def converts(self) -> FP8Config | None:
        """``fp8``, unless it is switched off."""
        return self.fp8 if self.fp8 is not None and self.fp8.enabled else None

    @property
    def untimely(self) -> str:
        """Why it cannot follow the times of ``fp8.recipe``'s rules; empty if it can."""
        counted = {"composer": ["ba", "ep", "sp", "tok"], "torchtitan": []}.get(self.trainer, ["ba"])
        if self.trainer in ("composer", "transformers") and (self.length is None or self.length.unit == "ep"):
            counted.append("dur")  # known when training begins
        policy = self.converts and self.converts.policy(torch.device("cpu"))
        return policy.untimely(counted, self.length) if policy and policy.moments else ""


def parse_algorithms(section: Mapping[str, Mapping[str, Any] | None] | None) -> dict[str, Any]:
    """The configurations of those algorithms of a YAML's ``algorithms`` that are this package's; a :class:`ConfigError` for a bad option."""
    ours = {name: options for name, options in (section or {}).items() if name in CONFIGS}
    return {name: from_mapping(CONFIGS[name], ours[name] or {}, f"algorithms.{name}") for name in ours}
