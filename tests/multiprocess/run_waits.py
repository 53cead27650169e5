"""Worker: a rank that fails, stalls or is killed inside a wait that this package adds. Arguments: the case, and the rank that has it or ``all``."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import foundry_fp8
from foundry_fp8.distributed import attendance
from foundry_fp8.distributed.compression.adapt import WAYS, Adaptation
from foundry_fp8.distributed.replicas import check_replicas
from foundry_fp8.distributed.traffic import Traffic

case, who, part = sys.argv[1:4]
attendance.LIMIT_S = 4.0
dist.init_process_group("gloo", timeout=timedelta(seconds=600))
rank = dist.get_rank()
fails = who == "all" or rank == int(who)
started = time.monotonic()


def happens():
    if case == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
    if case == "cublas":
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")
    if case == "error":
        raise ValueError("a word of the forward")
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(12)  # a stall
    os._exit(9)


def measure(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    foundry_fp8.apply_fp8(model, recipe="current", backend="emulated", include=["*"])
    middle = model[1]
    model = wrap(model)
    guard = foundry_fp8.DivergenceGuard(model, lambda model, batch: model(batch).square().mean())

    def hook(module, *_):
        if fails and guard.probe.passes == 2:
            happens()

    (middle.register_forward_hook if part == "forward" else middle.register_full_backward_hook)(hook)
    guard.batch, guard.rows = 7 * 20, 2
    found = guard.before_step(torch.randn(4, 32))
    print(f"WENT ON with {guard.rows} rows, {found}", flush=True)


def sharded(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def adapt():
    adaptation = Adaptation("int8", 0, Traffic())
    adaptation._times = {way: [0.1] * 5 for way in WAYS}
    adaptation._wire = dict.fromkeys(WAYS, 1.0)
    adaptation._attendance.when = ", batch 35"
    if fails:
        happens()
    adaptation._decide(torch.device("cpu"))


def replicas():
    model = DistributedDataParallel(nn.Linear(4, 4))
    if fails:
        happens()
    check_replicas(model, "algorithms.hybrid_sharding")


def compressed():
    """A step, and another in whose backward it happens."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    middle, model = plain[1], sharded(plain)
    options = {"warmup": 0, "min_bytes": 0, "block_size": 32, "scope": "all"}
    foundry_fp8.apply_compressed_communication(model, **options, parameters="int8")
    model(torch.randn(4, 32)).square().mean().backward()
    middle.register_full_backward_hook(lambda *_: happens() if fails else None)
    model(torch.randn(4, 32)).square().mean().backward()


try:
    if part in ("forward", "backward"):
        measure(sharded if "ddp" not in sys.argv else DistributedDataParallel)
    else:
        {"adapt": adapt, "replicas": replicas, "compressed": compressed}[part]()
except Exception as error:
    print(f"RAISED after {time.monotonic() - started:.1f} s: {type(error).__name__}: {error}", flush=True)
    os._exit(3)
os._exit(0)
