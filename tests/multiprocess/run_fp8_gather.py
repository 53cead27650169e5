"""Worker: FSDP2 gathers the weights of FP8 linears as their own codes, against a gather in high precision. Three ranks."""

import contextlib
import itertools
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from foundry_fp8.backends.emulated import EmulatedBackend
from foundry_fp8.distributed.compression.apply import apply_compressed_communication
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling
from foundry_fp8.numerics.wire_format import WireFormat

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
SIZES = (32, 80, 32)  # 80 and 32 rows do not divide by 3
BF16 = torch.bfloat16


def make(recipe, policy):
    torch.manual_seed(0)
    layers = [
        FP8Linear.from_linear(
            nn.Linear(i, o, bias=False), fqn=f"{i}", backend=EmulatedBackend(), recipe=recipe
        )
        for i, o in itertools.pairwise(SIZES)
    ]
    model = nn.Sequential(layers[0], nn.GELU(), layers[1])
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def train(recipe, policy, autocast, parameters, damaged=False, steps=3):
    """Outputs and gradients of some steps of two microbatches, the bytes that each rank sent, and the last evaluation."""
    model = make(recipe, policy)
    compression = apply_compressed_communication(
        model, gradients="bf16", warmup=1000, min_bytes=0, scope="all", parameters=parameters
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    if damaged and rank == 1:
        with torch.no_grad():
            next(model.parameters()).to_local()[3, 4] = float("inf")
    for step in range(steps):
        for part in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            x = torch.randn(16, SIZES[0], generator=generator)
            with torch.autocast("cpu", BF16) if autocast else contextlib.nullcontext():
                y = model(x)
            seen.append(y.detach().float())
            (y.float() - x).square().mean().backward()
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            seen.append(parameter.grad.full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    sent = {op: compression.traffic.sent[op] for op in ("all_gather", "all_reduce")}
    with torch.no_grad():
        evaluated = model.eval()(x).float()
    return seen, sent, evaluated


def message_bytes():
    """Codes and block scales, of which the latter are not used where there is one scale."""
    shards = [-(-o // world) * i for i, o in itertools.pairwise(SIZES)]
    return sum(WireFormat(name="e4m3").row_bytes(numel) for numel in shards)


def equal(a, b):
    ours = all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(a, b, strict=True))
    everywhere = [None] * world
    dist.all_gather_object(everywhere, ours)
    return everywhere


plain = MixedPrecisionPolicy()
current, power_2 = CurrentScaling(), CurrentScaling(power_2_scales=True)
results = {}
for name, (recipe, policy, autocast) in {
    "float32": (current, plain, False),
    "float32, powers of two": (power_2, plain, False),
    "autocast": (current, plain, True),
    "autocast, powers of two": (power_2, plain, True),
    "bfloat16 parameters": (current, MixedPrecisionPolicy(param_dtype=BF16), False),
    "block": (BlockScaling(), plain, True),
}.items():
    wanted, _, exact = train(recipe, policy, autocast, "none")
    got, sent, evaluated = train(recipe, policy, autocast, "e4m3")
    results[name] = {
        "equal": equal(wanted, got),
        "first_gradients": [
            float((b - a).norm() / a.norm()) for a, b in zip(wanted[2:4], got[2:4], strict=True)
        ],
        "sent": sent,
        "wanted_gather": 3
        * 2
        * 2
        * message_bytes()
        * (world - 1),  # steps, microbatches, forward and backward
        "wanted_amaxes": 3 * 2 * 2 * (8 - 8 // world),  # two float32 a microbatch
        "evaluation_error": float((evaluated - exact).norm() / exact.norm()),
    }
wanted, _, _ = train(current, plain, False, "none", damaged=True, steps=1)
got, _, _ = train(current, plain, False, "e4m3", damaged=True, steps=1)
results["damaged"] = {"equal": equal(wanted, got), "visible": not bool(got[0].isfinite().any())}

if rank == 0:
    with open(os.environ["RESULT_FILE"], "w") as file:
        json.dump(results, file)
    print(json.dumps(results, indent=1))
dist.barrier()
