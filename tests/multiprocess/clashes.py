"""For workers: what training on two ranks says of settings that do not go together, by name."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from composer.core import Event
from composer.devices import DeviceCPU
from composer.utils.parallelism import FSDP2Config, FSDPConfig, TPConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.algorithms.hybrid_sharding import HybridSharding
from foundry_fp8.distributed.compression.apply import apply_compressed_communication


def said(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return str(error)
    return "accepted"


def hybrid(fsdp, tp=None):
    state = SimpleNamespace(fsdp_config=fsdp, tp_config=tp, model=nn.Linear(4, 4), device=DeviceCPU())
    return said(HybridSharding(shard=2).apply, Event.INIT, state, None)


def compressed(wrapped, **options):
    return said(apply_compressed_communication, wrapped, **{"scope": "all", **options})


def fsdp1():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return FullyShardedDataParallel(
        nn.Linear(4, 4),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )


def texts():
    dist.init_process_group("gloo")
    found = {
        "hybrid, DDP": hybrid(None),
        "hybrid, tensor parallel": hybrid(FSDP2Config(), TPConfig()),
        "hybrid, rank 0 only": hybrid(FSDP2Config(load_monolith_rank0_only=True)),
        "hybrid, strategy": hybrid(FSDPConfig(sharding_strategy="SHARD_GRAD_OP")),
        "int4": compressed(fully_shard(nn.Linear(4, 4)), gradients="int4"),
        "error_feedback": compressed(fully_shard(nn.Linear(4, 4)), error_feedback=True),
        "stochastic": compressed(DistributedDataParallel(nn.Linear(4, 4)), rounding="stochastic"),
        "parameters": compressed(DistributedDataParallel(nn.Linear(4, 4)), parameters="e4m3"),
        "activations": compressed(DistributedDataParallel(nn.Linear(4, 4)), activations="fp8"),
        "one rank of a hybrid": compressed(fsdp1()),
    }
    dist.barrier()  # who ends first would break the connections of the other
    return found
