"""Averages for FSDP2 on gloo, which has none."""

from __future__ import annotations

from torch import nn

from foundry_fp8.compat.fsdp2 import units_of
from foundry_fp8.distributed.traffic import CountingGroup

__all__ = ["average_on_gloo"]


def average_on_gloo(model: nn.Module) -> None:
    """Give FSDP2 on gloo the averages that gloo lacks, without compressing: see :class:`CountingGroup`.

    Without it FSDP2 on a CPU multiplies gradients by the number of ranks, and its HSDP raises. Units on a GPU, and units that are
    attached already, are left alone.
    """
    for unit in units_of(model):
        if unit.device.type == "cpu" and not isinstance(unit.shard_group, CountingGroup):
            others = (unit.replicate_group, unit.scatter_group)
            unit.replace_groups(
                CountingGroup(unit.shard_group),
                *(None if group is None else CountingGroup(group) for group in others),
            )
