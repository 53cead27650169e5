"""Over which ranks delayed scaling takes the largest amaxes, and who does not come.

Cause: a module cannot ask which DDP is around it; DDP notes for dynamo the one whose forward runs
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/nn/parallel/distributed.py, ``_active_ddp_module``). Remove that when it can.
"""

from __future__ import annotations

import datetime
import logging
import math
import time
import weakref
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.compat.fsdp1 import is_flattened
from foundry_fp8.compat.fsdp2 import units_of
from foundry_fp8.compat.process_group import default_store

__all__ = ["AmaxGroup"]

log = logging.getLogger(__name__)
WAIT = datetime.timedelta(seconds=60)
"""After which ranks that others wait for are named."""


class AmaxGroup:
    """The ranks of :attr:`DelayedScaling.amax_group`, ``choice``; of copied layers, of no root, those ``like`` the original's."""

    def __init__(self, choice: str, like: AmaxGroup | None = None) -> None:
        self.choice, self.like = choice, like
        self._root: Any = None
        self._found: list[Any] = []
        self._of_shards: list[Any] = []
        self._rounds = self._updates = 0

    def __deepcopy__(self, memo: Any) -> AmaxGroup:
        return AmaxGroup(self.choice, like=self)

    def __reduce__(self) -> Any:
        return AmaxGroup, (self.choice,)

    def follow(self, root: nn.Module) -> None:
        """Look around ``root``, which training calls, and in it."""
        self._root, self._found = weakref.ref(root), []

    def also(self, group: Any) -> None:
        """The ranks of ``group`` hold parts of a layer's tensors: tensor parallelism, which under FSDP1 only the layer sees."""
        if group not in self._of_shards:
            self._of_shards.append(group)
            self._found = []

    def data_parallel_size(self) -> int:
        """Over how many ranks gradients are averaged, as far as that shows outside of a forward."""
        root = self._root and self._root()
        if root is None or not (dist.is_available() and dist.is_initialized()):
            return 1
        if around := _around(root, None):
            return math.prod(group.size() for group in around)
        tensor_parallel = any(isinstance(p, DTensor) for p in root.parameters())
        return 1 if tensor_parallel else dist.get_world_size()

    def groups(self) -> list[Any]:
        """Their product is the ranks; none where amaxes are this rank's own."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if self.choice != "model" or not several:
            return [dist.group.WORLD] if several and self.choice == "world" else []
        ddp: Any = DistributedDataParallel._active_ddp_module
        if ddp is not None and ddp._join_config.enable:
            raise RuntimeError(
                "ddp.join(): ranks that are done take no part in delayed scaling's amaxes, which the others would wait for. Set the "
                "recipe's amax_group: none, or use recipe: current, block or mxfp8."
            )
        root = self._root and self._root()
        if root is None:
            return [] if self.like is None else self.like.groups()
        if ddp is not None or not self._found:
            sharded = (p.device_mesh.get_all_groups() for p in root.parameters() if isinstance(p, DTensor))
            found = list(dict.fromkeys([*_around(root, ddp), *self._of_shards, *chain(*sharded)]))
            everyone = math.prod(group.size() for group in found) == dist.get_world_size()
            self._found = [dist.group.WORLD] if everyone else found
        self._updates += 1
        if not self._found and self._updates == 2:  # after a forward
            log.warning(
                "Neither DDP nor FSDP is around the model, so delayed scaling's amaxes are those of this rank. Where you average gradients "
                "yourself, set the recipe's amax_group: world."
            )
        return self._found

    def reduce_(self, amaxes: Tensor) -> None:
        """Make ``amaxes`` the largest of all ranks. On a GPU the device waits, and NCCL's watchdog names the time-out."""
        for group in self.groups():
            self._rounds += 1
            try:
                work: Any = dist.all_reduce(amaxes, dist.ReduceOp.MAX, group, async_op=True)
                try:
                    work.wait(*([] if amaxes.is_cuda else [WAIT]))
                except RuntimeError:
                    if work.is_completed():
                        raise
                    log.error("%s", self._missing(group))
                    work.wait()
            except RuntimeError as error:
                raise RuntimeError(self._missing(group)) from error

    def _missing(self, group: dist.ProcessGroup) -> str:
        """Who has not said over the rendezvous store that it waits too."""
        store, ranks, me = default_store(), dist.get_process_group_ranks(group), dist.get_rank()
        key = f"foundry_fp8/amax/{ranks}/{self._rounds}/"
        try:
            store.set(f"{key}{me}", "waits")
            time.sleep(1 if me else 3)  # with rank 0 the store ends, in which the others read
            missing = [r for r in ranks if not store.check([f"{key}{r}"])]
        except dist.DistError:
            missing = [0]
        return (
            f"delayed scaling: ranks {missing} of {ranks} do not come to the {self._rounds}. exchange "
            f"of amaxes, for which rank {me} waits: they run no training forward of this model. Run one on every rank; or call it in eval() "
            "where it does not train, keep it out of DDP and FSDP, or set the recipe's amax_group: none."
        )


def _around(model: nn.Module, ddp: Any) -> list[Any]:
    """Groups whose product is the ranks that hold ``model``, whole or in parts; none where nothing replicates or shards it."""
    if ddp is not None or isinstance(model, DistributedDataParallel):
        return [(ddp or model).process_group]
    for unit in model.modules():
        if isinstance(unit, FullyShardedDataParallel):
            found = (unit.process_group, getattr(unit, "_inter_node_pg", None))
            return [group for group in found if group is not None]
    first = next(model.parameters(), None)
    if first is None or is_flattened(first):  # an FSDP1 unit around it, which it cannot ask
        return [dist.group.WORLD]
    return next(([*unit.mesh.get_all_groups()] for unit in units_of(model)), [])
