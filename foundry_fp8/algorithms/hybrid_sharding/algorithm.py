"""The Composer algorithm ``hybrid_sharding``."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from composer.core import Event, State
from composer.loggers import Logger
from composer.utils.parallelism import FSDP2Config, FSDPConfig
from torch.distributed.device_mesh import DeviceMesh

from foundry_fp8.algorithms.method import Method
from foundry_fp8.callbacks.run_log import ensure_run_log, log_facts
from foundry_fp8.compat.composer_device import device_of
from foundry_fp8.distributed.hybrid_sharding.apply import (
    KEY,
    HybridShardingConfig,
    hybrid_degrees,
    hybrid_mesh,
)
from foundry_fp8.distributed.mesh import alone
from foundry_fp8.distributed.replicas import check_replicas
from foundry_fp8.distributed.traffic import average_on_gloo
from foundry_fp8.run.clashes import refuse
from foundry_fp8.run.settings import Run

__all__ = ["HybridSharding"]

log = logging.getLogger(__name__)

NAMES = ("data_parallel_replicate", "data_parallel_shard")  # Composer's, by which it saves one replica only


class HybridSharding(Method):
    """Shards inside small groups of ranks and replicates across them.

    Runs on ``Event.INIT``, when Composer has made its own mesh and has not wrapped the model yet. Composer overwrites a
    mesh given in FSDP2's config with a 1-D one (composer issue 3916); here the 2-D mesh is put in its place. FSDP1 with a shard
    group of one rank becomes NO_SHARD over all ranks: torch would run HYBRID_SHARD as NO_SHARD over the one rank, and never reduce a
    gradient. On ``Event.AFTER_LOAD`` gloo's missing averages are supplied, on a CPU. Replicas are compared on ``Event.AFTER_LOAD`` and on
    the first ``Event.BATCH_END``.

    With one rank it warns and does nothing.

    Args:
        **options: The fields of :class:`~foundry_fp8.distributed.hybrid_sharding.apply.HybridShardingConfig`.

    Attributes:
        degrees: ``(replicate, shard)``; ``None`` before ``Event.INIT``.
    """

    config_class = HybridShardingConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.degrees: tuple[int, int] | None = None
        self._checked = not self.config.check_replicas

    def match(self, event: Event, state: State) -> bool:
        """Run on INIT, AFTER_LOAD and BATCH_END."""
        return event in (Event.INIT, Event.AFTER_LOAD, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Put the mesh in place, or compare replicas."""
        if event == Event.INIT:
            self._place_mesh(state, logger)
        elif self.degrees != (1, 1):
            if event == Event.AFTER_LOAD and isinstance(state.fsdp_config, FSDP2Config):
                average_on_gloo(state.model)
            if not self._checked:
                check_replicas(state.model, KEY)
            self._checked = self._checked or event == Event.BATCH_END

    def _place_mesh(self, state: State, logger: Logger) -> None:
        fsdp, device = state.fsdp_config, device_of(state)
        if alone():
            self.degrees = hybrid_degrees(state.model, self.config, device=device)
            return
        tensor_parallel, ranks = state.tp_config is not None, dist.get_world_size()
        refuse(Run(ranks=ranks, fsdp=fsdp, tensor_parallel=tensor_parallel, hybrid_sharding=self.config))
        assert fsdp is not None
        replicate, shard = self.degrees = hybrid_degrees(state.model, self.config, device=device)
        if isinstance(fsdp, FSDPConfig) and shard == 1:
            assert dist.group.WORLD is not None
            mesh = DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=NAMES[1:])
            fsdp.sharding_strategy = "NO_SHARD"
        else:
            mesh = hybrid_mesh(device.type, replicate, shard, NAMES)
            if isinstance(fsdp, FSDPConfig):
                fsdp.sharding_strategy = "HYBRID_SHARD"
                fsdp.data_parallel_replicate_degree, fsdp.data_parallel_shard_degree = replicate, shard
        state.device_mesh = mesh
        fsdp.device_mesh = mesh
        log.info("%s: %d copies of the model, each over %d ranks", KEY, replicate, shard)
        ensure_run_log(state, logger)
        log_facts(logger, {"hybrid_sharding/replicate": replicate, "hybrid_sharding/shard": shard})
