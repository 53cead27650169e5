"""FSDP2's units: what one ``fully_shard`` call owns, its groups, and its parameters.

Cause: torch has no public way to the parameter group of an ``FSDPModule``, to the process groups of its mesh or to what is known of
its parameters (https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py,
``FSDPParamGroup``; ``_fsdp_param.py``, ``FSDPParam``). Since torch 2.12 a module may have several (parameters on different meshes),
since torch 2.15 a group of its own for the reduce-scatter. Remove when it has.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundry_fp8.compat.wrapper_tensor import WrapperTensor
from foundry_fp8.config.versions import moved

__all__ = ["ShardedParameter", "Unit", "abandon_pass", "lazy_init", "shard_versions", "units_of"]

_OF_A_GROUP = ("fsdp_params", "mesh_info", "post_forward_mesh_info", "device")
_OF_A_PARAMETER = (
    "padded_sharded_param_size", "sharded_param", "is_dtensor", "fsdp_placement", "offload_to_cpu", "mesh_info", "_orig_size",
    "_module_info", "_sharded_param_data", "_sharded_local_tensor", "_init_extensions",
)  # fmt: skip


class ShardedParameter:
    """What is known of one parameter of a unit.

    Attributes:
        size: Of the whole parameter.
        dtype: That it is kept in.
        module: Whose parameter it is.
        name: In that module.
        shared: Whether other modules have it too.
        ranks: Over which it is sharded.
    """

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        info = parameter._module_info
        self.size: torch.Size = parameter._orig_size
        self.dtype: torch.dtype = parameter.sharded_param.dtype
        self.module: nn.Module = info.module
        self.name: str = info.param_name
        self.shared = bool(info.shared_modules)
        self.ranks: int = parameter.mesh_info.shard_mesh_size

    @property
    def padded_numel(self) -> int:
        """Elements of each rank's shard, padded to the largest."""
        return int(self._parameter.padded_sharded_param_size.numel())

    @property
    def gathered_dtype(self) -> torch.dtype:
        """That it is gathered in."""
        return getattr(self._parameter, "param_dtype", None) or self.dtype  # there from lazy_init on

    @property
    def trains(self) -> bool:
        """Whether it gets a gradient."""
        return bool(self._parameter.sharded_param.requires_grad)

    @property
    def shard(self) -> Tensor:
        """This rank's rows, flat, padded with zeros to those of rank 0."""
        return self._parameter._sharded_param_data

    @property
    def unsupported_reason(self) -> str | None:
        """Why its shard is not rows of a plain parameter on the device, or ``None``."""
        if not self.dtype.is_floating_point:
            return f"dtype {self.dtype}"
        if isinstance(self._parameter._sharded_local_tensor, WrapperTensor):
            return "kept in FP8 alone"
        if self._parameter.is_dtensor:
            return "tensor parallel"
        if self._parameter.fsdp_placement.dim != 0:
            return f"sharded on dim {self._parameter.fsdp_placement.dim}"
        return "offloaded to the CPU" if self._parameter.offload_to_cpu else None

    def extend(self, pre_all_gather: Any, post_all_gather: Any) -> None:
        """Have the all-gather send and read what these two say (torch's extension), unless it does already."""
        local = self._parameter._sharded_local_tensor
        if hasattr(local, "fsdp_pre_all_gather"):
            return
        local.fsdp_pre_all_gather = pre_all_gather
        local.fsdp_post_all_gather = post_all_gather
        if not hasattr(self._parameter, "_extensions_data"):
            self._parameter._init_extensions()

    def version(self) -> tuple[int, int, int]:
        """Other numbers where the shard is another or was written to."""
        shard: Any = self._parameter.sharded_param
        return id(shard), shard._version, shard._local_tensor._version


@dataclasses.dataclass
class Unit:
    """The parameters of one ``fully_shard`` call, or where they are on several meshes those of one mesh.

    Attributes:
        name: The module's.
        module: The module.
    """

    name: str
    module: Any
    _group: Any

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._group.device

    @property
    def parameters(self) -> list[ShardedParameter]:
        """In the order of its messages. Padded and named for good after :func:`lazy_init`."""
        return [ShardedParameter(parameter) for parameter in self._group.fsdp_params]

    @property
    def mesh(self) -> Any:
        """Over which it replicates and shards."""
        return self._group.mesh_info.mesh

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Over which it gathers and reduce-scatters."""
        return self._group.mesh_info.shard_process_group

    @property
    def scatter_group(self) -> dist.ProcessGroup | None:
        """A group of its own for the reduce-scatter, if it has one."""
        return getattr(self._group.mesh_info, "reduce_scatter_process_group", None)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """Over which the copies of a shard are reduced, in HSDP."""
        return getattr(self._group.mesh_info, "replicate_process_group", None)

    @property
    def reshards_to_fewer(self) -> bool:
        """``reshard_after_forward: <int>``."""
        after = self._group.post_forward_mesh_info
        return after is not None and after is not self._group.mesh_info

    @property
    def nbytes(self) -> int:
        """Bytes of the whole unit's gradients, in the parameters' dtype."""
        return sum(p.size.numel() * p.dtype.itemsize for p in self.parameters)

    def replace_groups(
        self,
        shard: dist.ProcessGroup,
        replicate: dist.ProcessGroup | None,
        scatter: dist.ProcessGroup | None = None,
    ) -> None:
        """Use other groups of the same ranks, in this unit alone."""
        group, was = self._group, self._group.mesh_info
        group.mesh_info = copy.copy(was)
        if group.post_forward_mesh_info is was:
            group.post_forward_mesh_info = group.mesh_info
        group.mesh_info.shard_process_group = shard
        if replicate is not None:
            group.mesh_info.replicate_process_group = replicate
        if scatter is not None:
            group.mesh_info.reduce_scatter_process_group = scatter


def units_of(model: nn.Module) -> list[Unit]:
    """The FSDP2 units of ``model`` (itself included) that own parameters, outermost first.

    Raises:
        RuntimeError: This torch keeps them elsewhere.
    """
    if not dist.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    units = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = hasattr(state, "_fsdp_param_groups")  # torch 2.12
            _check(state, ("_fsdp_param_groups" if several else "_fsdp_param_group", "_lazy_init"))
            for group in state._fsdp_param_groups if several else (state._fsdp_param_group,):
                if group is not None:
                    _check(group, _OF_A_GROUP)
                    _check(group.fsdp_params[0], _OF_A_PARAMETER)
                    units.append(Unit(name, module, group))
    return units


def lazy_init(model: nn.Module) -> None:
    """Do now what FSDP2 would do in the first forward: pad and name the parameters for good."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._get_fsdp_state()._lazy_init()


def abandon_pass(model: nn.Module) -> None:
    """After a forward or backward that raised: the next one finds FSDP2 as after one that ended, and nothing of its gradients."""
    from torch.distributed.fsdp import FSDPModule

    for unit in units_of(model):
        for parameter in unit._group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # later it is the parameter's
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        if unit._group.device.type == "cpu":  # there is no stream to wait on, which torch does not ask
            unit._group._all_gather_result = None
    for root in model.modules():
        state: Any = root._get_fsdp_state() if isinstance(root, FSDPModule) else None
        if state is not None and state._is_root and hasattr(root, "reset_iter_state"):  # torch 2.15
            root.reset_iter_state()  # type: ignore[operator]
        elif state is not None and state._is_root:
            state._root_post_backward_final_callback()
            state._state_ctx.iter_forward_root = None


def shard_versions(model: nn.Module) -> tuple[int, ...]:
    """Identity and version of every shard of the units in ``model``; empty without FSDP2.

    FSDP2 gathers into the same memory every time and keeps the version counter of what it gathers into, so neither the address nor the
    counter of an unsharded weight shows a write to its shard (``_fsdp_param.py``, ``init_unsharded_param``). The counters of the
    shards do.
    """
    return tuple(n for unit in units_of(model) for parameter in unit.parameters for n in parameter.version())


def _check(found: Any, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        raise moved(f"no longer has {', '.join(missing)} on FSDP2's {type(found).__name__}", "fsdp2")
