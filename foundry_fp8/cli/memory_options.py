"""Options of a memory plan that are no matter of blocks: other optimizers, frozen weights in FP8, and what a cache keeps of weights."""

from __future__ import annotations

from typing import Any

from foundry_fp8.config import ConfigError, format_bytes
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.planning.memory.cluster import Cluster
from foundry_fp8.planning.memory.cost_model import CostModel
from foundry_fp8.planning.memory.measure import held_bytes
from foundry_fp8.planning.memory.optimizer_state import optimizer_bytes
from foundry_fp8.surgery.frozen_weights import frozen_linears

__all__ = ["cached_weights", "frozen_weights", "other_optimizers"]


def other_optimizers(model: Any, state_bytes: int, shard: int, on_paper: bool) -> str:
    """Of which optimizers a rank would keep less, where torchao is installed: one line each.

    ``on_paper`` their seconds are what reading and writing the states takes, all else being alike.
    """
    try:
        from foundry_fp8.models.low_bit_adamw import AdamW8bit, AdamWFp8
    except ImportError:
        return ""
    lines, kinds = "", {"adamw_8bit": AdamW8bit, "adamw_fp8": AdamWFp8}
    optimizer: Any
    for name, optimizer in kinds.items():
        kept = optimizer_bytes([optimizer([p for p in model.parameters() if p.requires_grad])])
        if kept < state_bytes:
            lines += (
                f"option optimizer: {{name: {name}}} (lossy; DDP or FSDP2): states take {format_bytes(kept / shard)} instead of "
                f"{format_bytes(state_bytes / shard)}"
            )
            if on_paper:
                less = 2 * (state_bytes - kept) / shard / CostModel().bytes_per_second
                lines += f", and a step {1e3 * less:.2f} ms less to read and write them"
            lines += "\n"
    return lines


def frozen_weights(model: Any, cluster: Cluster | None, on_paper: bool) -> str:
    """What ``fp8.frozen_weights: fp8`` would save, where something is frozen and FSDP does not shard it."""
    converted = {name: module for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    weights = [linear.weight for linear in frozen_linears(model, converted).values()]
    kept = any(isinstance(one.weight, FrozenFP8Weight) for one in converted.values())
    if kept and cluster is not None and cluster.sharding != "NO_SHARD":
        raise ConfigError(
            "--world-size: weights that are kept in FP8 do not run under the trainer's FSDP. Leave out fsdp_config."
        )
    now, codes = sum(held_bytes(weight) for weight in weights), sum(weight.numel() for weight in weights)
    if codes * 1.1 >= now or (cluster is not None and cluster.shard > 1):
        return ""
    line = f"option fp8.frozen_weights: fp8 (DDP or one device): frozen weights take {format_bytes(codes)} instead of {format_bytes(now)}"
    if on_paper:
        more = 2 * (codes + now) / CostModel().bytes_per_second
        line += f", and a microbatch {1e3 * more:.2f} ms more to unpack them for forward and backward"
    return f"{line}\n"


def cached_weights(model: Any) -> str:
    """What ``fp8.cache_weights`` keeps beside the plan: on each rank of unsharded weights."""
    backend = getattr(FP8State.of(model), "backend", None)
    cached = backend is not None and "cache_weights" not in backend.lacks and backend.options.cache_weights
    elements = sum(m.weight.numel() for m in model.modules() if isinstance(m, FP8Linear))
    if cached == "auto":
        return f"fp8.cache_weights: auto keeps {format_bytes(elements)} more, from forward to backward, only where they are left over\n"
    said = f"fp8.cache_weights: true keeps {format_bytes(2 * elements)} more than the plan counts\n"
    return said if cached else ""
