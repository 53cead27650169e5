"""The units of an FSDP2 model (one per ``fully_shard`` call that owns parameters), and averages for them on gloo.

``FSDPParamGroup`` and its ``mesh_info`` are private to torch: this file is the one place that finds them.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from foundry_fp8.distributed.traffic import CountingGroup

__all__ = ["Unit", "average_on_gloo", "units_of"]


@dataclasses.dataclass
class Unit:
    """One ``fully_shard`` call that owns parameters.

    Attributes:
        name: The module's.
        module: The module.
        group: Its ``FSDPParamGroup``.
    """

    name: str
    module: FSDPModule
    group: Any

    @property
    def replicates(self) -> bool:
        """Whether the mesh is 2-D (HSDP)."""
        return hasattr(self.group.mesh_info, "replicate_process_group")

    @property
    def shard_numel(self) -> int:
        """Elements of a rank's padded shard: what the replicate leg reduces."""
        return sum(p.padded_sharded_param_size.numel() for p in self.group.fsdp_params)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole unit's gradients, in the parameters' dtype."""
        return sum(p._orig_size.numel() * p.sharded_param.element_size() for p in self.group.fsdp_params)


def units_of(model: nn.Module) -> list[Unit]:
    """The FSDP2 units of ``model`` that own parameters, outermost first.

    Raises:
        RuntimeError: This torch keeps them elsewhere.
    """
    units = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if not hasattr(state, "_fsdp_param_group"):
            raise RuntimeError(
                f"torch {torch.__version__} keeps FSDP2's parameter groups in a place this version of "
                "foundry_fp8 does not know. Tested: torch 2.7."
            )
        if state._fsdp_param_group is not None:
            units.append(Unit(name, module, state._fsdp_param_group))
    return units


def average_on_gloo(model: nn.Module) -> None:
    """Give FSDP2 on gloo the averages that gloo lacks, without compressing: see :class:`CountingGroup`.

    Without it FSDP2 on a CPU multiplies gradients by the number of ranks, and its HSDP raises. Units on a GPU, and units that are
    attached already, are left alone.
    """
    for unit in units_of(model):
        if unit.group.device.type != "cpu":
            continue
        mesh_info = copy.copy(unit.group.mesh_info)
        for leg in ("shard_process_group", "replicate_process_group"):
            group = getattr(mesh_info, leg, None)
            if group is not None and not isinstance(group, CountingGroup):
                setattr(mesh_info, leg, CountingGroup(group))
        if unit.group.post_forward_mesh_info is unit.group.mesh_info:
            unit.group.post_forward_mesh_info = mesh_info
        unit.group.mesh_info = mesh_info
