"""Worker: one rank fails somewhere in a step; every other rank says when it knew. Arguments: case, place, wrapper, rank or all,
and what else the training has."""

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import foundry_fp8
from foundry_fp8.distributed import attendance
from foundry_fp8.distributed.compression.adapt import WAYS, Adaptation
from foundry_fp8.distributed.replicas import check_replicas
from foundry_fp8.distributed.traffic import Traffic

case, place, wrapper, who = sys.argv[1:5]
beside = sys.argv[5] if len(sys.argv) > 5 else ""
LIMIT = 4.0
attendance.LIMIT_S, attendance.GRACE_S = LIMIT, 1.0
# What training itself waits for ends by the job's limit; the waits of this package by one of their own.
ours = place in ("measured_forward", "measured_backward", "adapt", "agree", "replicas")
dist.init_process_group("gloo", timeout=timedelta(seconds=600 if ours else LIMIT))
rank, world = dist.get_rank(), dist.get_world_size()
fails = who == "all" or rank == int(who)


def happens(*_):
    if not (fails and armed) or case == "nothing":
        return
    print(f"FAILS at {time.monotonic():.2f}", flush=True)
    if case == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
    if case == "cublas":
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")
    if case == "error":
        raise ValueError("a word of the forward")
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.monotonic() + LIMIT + 8
    while time.monotonic() < until and not all(others_know()):  # a stall, for as long as anybody waits
        time.sleep(0.1)
    os._exit(9)


def others_know():
    """Whether each other rank has said that it knows, in the file of its output."""
    return ("KNOWS" in Path(f"out{other}").read_text() for other in range(world) if other != rank)


def wrapped(model):
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp1":
        for i, layer in enumerate(model):
            model[i] = FullyShardedDataParallel(layer, use_orig_params=True, device_id=torch.device("cpu"))
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if wrapper == "hsdp1":
        groups = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        how = {"device_mesh": groups, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        how |= {"use_orig_params": True, "device_id": torch.device("cpu")}
        for i, layer in enumerate(model):
            model[i] = FullyShardedDataParallel(layer, **how)
        return FullyShardedDataParallel(model, **how)
    sizes, names = ((2, world // 2), ("replicate", "shard")) if wrapper == "hsdp2" else ((world,), ("shard",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Adapted(nn.Module):
    """A frozen linear with a low-rank adapter that trains."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(32, 32).requires_grad_(False)
        self.a, self.b = nn.Linear(32, 16, bias=False), nn.Linear(16, 32, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def block():
    return Adapted() if beside == "lora" else nn.Linear(32, 32)


def loss_of(model, batch):
    with torch.autocast("cpu", torch.bfloat16, enabled=beside == "autocast"):
        return model(batch).square().mean()


def without_sync():
    """Gradients of this backward stay on their rank, as in accumulation."""
    if wrapper.endswith("2"):
        model.set_requires_gradient_sync(False)
        return contextlib.nullcontext()
    return model.no_sync()


torch.manual_seed(0)
plain = (Recomputed if beside == "recompute" else nn.Sequential)(*(block() for _ in range(3)))
foundry_fp8.apply_fp8(plain, recipe="delayed", backend="emulated", include=["*"])
middle, armed = plain[1], False
if beside == "compile":
    for layer in plain:
        layer.compile(backend="aot_eager")
model = wrapped(plain)
if place.endswith("backward"):
    middle.register_full_backward_hook(happens)
elif place.endswith("forward"):
    middle.register_forward_hook(happens)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step():
    if beside == "accumulation":
        with without_sync():
            loss_of(model, torch.randn(4, 32, generator=torch.Generator().manual_seed(9 + rank))).backward()
        if wrapper.endswith("2"):
            model.set_requires_gradient_sync(True)
    loss_of(model, torch.randn(4, 32, generator=torch.Generator().manual_seed(rank))).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def run():
    global armed
    if place in ("forward", "backward") or wrapper == "hsdp2":  # which gloo cannot average for
        options = {"warmup": 0, "min_bytes": 0, "block_size": 32, "scope": "all", "gradients": "int8"}
        foundry_fp8.apply_compressed_communication(model, **options)
    step()
    dist.barrier()
    armed = True
    if place in ("forward", "backward"):
        step()
    elif place.startswith("measured"):
        guard = foundry_fp8.DivergenceGuard(model, loss_of, rows=2, loss_limit=1e9, gradient_limit=1e9)
        guard.batch = 7 * 20
        guard.before_step(torch.randn(4, 32))
        armed = False
        step()
        parts = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
        print(f"WENT ON with {guard.rows} rows, {[float(p.double().sum()) for p in parts]}", flush=True)
    elif place == "adapt":
        adaptation = Adaptation("int8", 0, Traffic())
        adaptation._times, adaptation._wire = {way: [0.1] * 5 for way in WAYS}, dict.fromkeys(WAYS, 1.0)
        adaptation._attendance.when = ", batch 35"
        happens()
        adaptation._decide(torch.device("cpu"))
    elif place == "replicas":
        happens()
        check_replicas(model, "algorithms.hybrid_sharding")
    elif place == "agree":
        happens()
        foundry_fp8.apply_compressed_communication(model, warmup=0)
    elif place == "checkpoint":
        state = foundry_fp8.training_state(model)
        loss_of(model, torch.randn(4, 32)).backward()
        happens()
        state.state_dict()


try:
    run()
except Exception as error:
    print(f"KNOWS at {time.monotonic():.2f}: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
    os._exit(3)
print(f"ENDED at {time.monotonic():.2f}", flush=True)
os._exit(0)
