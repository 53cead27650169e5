"""FOG under tensor parallelism: a plan for torch's ``parallelize_module``, and for LLM Foundry as ``tp_config: {strategy: fog}``.

The two feed-forward matrices of each block are sharded, four fifths of its weights at the published sizes. ``qkv_proj`` is not: its
rows are heads of q, then of k, then of v, which no placement of torch's gives to ranks by heads; with it ``o_proj`` stays whole.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from foundry_fp8.config import ConfigError
from foundry_fp8.models.fog.feedforward import XIELU

__all__ = ["feed_forward_plan"]


def feed_forward_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """The plan of ``model``, which was converted before: ranks of the mesh read the same batch.

    Raises:
        ConfigError: No feed-forward of ``up_proj``, ``act`` and ``down_proj``: FOG's gated variants have their two
            matrices in one.
    """
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if {child for child, _ in module.named_children()} - {"post_norm"} == {"up_proj", "act", "down_proj"}:
            plan |= {f"{name}.up_proj": ColwiseParallel(), f"{name}.down_proj": RowwiseParallel()}
            if isinstance(module.act, XIELU):
                plan[f"{name}.act"] = _SharesSlopes()
    if not plan:
        raise ConfigError(
            "tp_config.strategy: fog shards feed-forwards of up_proj, act and down_proj, and the model has none. Use variant fog-max, fog-opt, "
            "fog-flash or op1, or leave tp_config out."
        )
    return plan


class _SharesSlopes(ParallelStyle):
    """xIELU of a rank's own columns: its two parameters stay whole, their gradients are summed over ranks."""

    def _apply(self, module: Any, device_mesh: Any) -> nn.Module:
        module.shared_by = device_mesh
        return module
