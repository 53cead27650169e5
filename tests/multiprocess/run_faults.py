"""Worker: what must end in an error on every rank, and never in a hang.

Arguments: ``all``; or ``waits`` and two ports, for two cases of two ranks each that wait side by side for their time limit.
"""

import contextlib
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from foundry_fp8.distributed.compression.apply import apply_compressed_communication
from foundry_fp8.distributed.traffic import CountingGroup

# Short only where ranks wait in vain; elsewhere a busy machine must not look like a missing rank.
if sys.argv[1] == "waits":
    pair, rank = divmod(int(os.environ["RANK"]), 2)
    case = ("one_rank_only", "stuck")[pair]
    store = f"tcp://127.0.0.1:{sys.argv[2 + pair]}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
else:
    case = "all"
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank = dist.get_rank()
COMMON = {"warmup": 0, "min_bytes": 0, "block_size": 32, "scope": "all"}


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 30), nn.ReLU(), nn.Linear(30, 4))


def sharded(**options):
    """``options``: of its first layer; the root stays gathered whatever it is given."""
    model = make()
    if options:
        fully_shard(model[0], **options)
    fully_shard(model)
    return model


def refusal(model, **options):
    try:
        apply_compressed_communication(model, **{**COMMON, **options})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def step(wrapped):
    wrapped(torch.randn(8, 16)).square().mean().backward()


def other_divisor():
    """FSDP2 asks for a pre-multiplied sum, which a reduction of codes cannot be."""
    model = sharded()
    newer = getattr(model, "set_gradient_divide_factor", None)
    (newer or model.set_reduce_scatter_divide_factor)(8.0)
    try:
        apply_compressed_communication(model, **COMMON)
        step(model)
    except Exception as error:  # torch may raise one of its own over it: compat/collective_errors.py
        return f"{type(error).__name__}: {error}"
    return "accepted"


class Without(CountingGroup):
    def alltoall_base(self, *_):
        raise RuntimeError("Backend does not support alltoall_base")


def refusals():
    """What cannot run, each on every rank; the process group lives on."""
    without = DDP(make())
    without.process_group = Without(without.process_group)
    return {
        "differ": refusal(DDP(make()), gradients="int8" if rank else "e4m3"),
        "unwrapped": refusal(make()),
        "ddp_parameters": refusal(DDP(make()), parameters="int8"),
        "fsdp_int4": refusal(sharded(), gradients="int4"),
        "fsdp_feedback": refusal(sharded(), error_feedback=True),
        "inter_node": refusal(DDP(make()), scope="inter_node"),
        "ddp_stochastic": refusal(DDP(make()), rounding="stochastic"),
        "no_all_to_all": refusal(without),
        "fewer": refusal(sharded(reshard_after_forward=2), parameters="int8"),
        "divisor": other_divisor(),
    }


def padded_reload():
    """30 rows on 4 ranks: a reload makes new local tensors on the padded rank only, and drops what was bound there."""
    model, original = sharded(), make()
    apply_compressed_communication(model, **COMMON, parameters="int8")
    step(model)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    x = torch.randn(8, 16)
    return float((model(x) - original(x)).norm() / original(x).norm())


if case == "one_rank_only":
    wrapped = DDP(make())
    if rank == 0:
        print(refusal(wrapped), flush=True)
        sys.exit(3)
    step(wrapped)  # the other rank goes on, and must not wait for ever
    step(wrapped)
elif case == "stuck":
    wrapped = DDP(make())
    apply_compressed_communication(wrapped, **COMMON)
    step(wrapped)
    if rank == 1:
        with contextlib.suppress(RuntimeError):
            while True:  # stuck outside of any collective, until rank 0 ends and its store with it
                dist.distributed_c10d._get_default_store().check(["key"])
                time.sleep(0.5)
        os._exit(0)
    try:
        step(wrapped)
    except RuntimeError as error:
        print(f"ended by: {error}", flush=True)
        os._exit(4)
else:
    results = {"refusals": refusals(), "padded_reload": padded_reload()}
    print(
        "RESULT " + json.dumps(results), flush=True
    )  # no collective: the damage ended the ranks at different places
    os._exit(0)
print("reached the end", flush=True)
