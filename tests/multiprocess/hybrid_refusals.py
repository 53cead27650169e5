"""For workers: what the ``hybrid_sharding`` algorithm says where it cannot make its mesh."""

from types import SimpleNamespace

import torch.distributed as dist
from composer.core import Event
from composer.devices import DeviceCPU
from composer.utils.parallelism import FSDP2Config, FSDPConfig, TPConfig
from torch import nn

from foundry_fp8.algorithms.hybrid_sharding import HybridSharding


def refusals():
    """The error of each configuration."""
    dist.init_process_group("gloo")
    cases = {
        "no_fsdp": (None, None),
        "tensor_parallel": (FSDP2Config(), TPConfig()),
        "rank0_only": (FSDP2Config(load_monolith_rank0_only=True), None),
        "strategy": (FSDPConfig(sharding_strategy="SHARD_GRAD_OP"), None),
    }
    found = {}
    for name, (fsdp, tp) in cases.items():
        device = DeviceCPU()
        state = SimpleNamespace(fsdp_config=fsdp, tp_config=tp, model=nn.Linear(4, 4), device=device)
        try:
            HybridSharding(shard=2).apply(Event.INIT, state, None)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    dist.barrier()
    return found
