"""Worker: compression of every wrapper together with autocast, clipping, loss scaling and activation checkpointing."""

import copy
import json
import os
import sys

import torch
import torch.distributed as dist
from composer.algorithms.gradient_clipping import apply_gradient_clipping
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from foundry_fp8.distributed.compression.apply import apply_compressed_communication
from tests.multiprocess.wrapped import (
    COMMON,
    KINDS,
    ORIGINAL,
    backward,
    clean,
    compare,
    gradients,
    loss_of,
    parameters_of,
    rank,
    reference,
    world,
    wrap,
)


def attached(kind, checkpointed=False, **options):
    model = wrap(kind)
    for module in model.modules():
        if hasattr(module, "checkpointed"):
            module.checkpointed = checkpointed
    compression = apply_compressed_communication(
        model, **COMMON, gradients="int8", second_leg="int8", **options
    )
    compression.start_batch(0)
    backward(model, 7, 1)  # DDP rebuilds its buckets after the first
    model.zero_grad()
    return model, compression


def everywhere(value):
    values = [None] * world
    dist.all_gather_object(values, value)
    return values


def autocast_reference(step):
    """The float64 mean of all ranks' gradients, each computed under autocast."""
    total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in ORIGINAL.named_parameters()}
    for who in range(world):
        model = copy.deepcopy(ORIGINAL)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, step, who, 0)
        loss.backward()
        for name, parameter in model.named_parameters():
            total[name] += parameter.grad.double() / world
    return total


def autocast(kind):
    model, _ = attached(kind)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, 3, rank, 0)
    loss.backward()
    return compare(gradients(model), autocast_reference(3))


def clipping(kind):
    """Composer's gradient_clipping to half the norm of what was reduced."""
    model, _ = attached(kind)
    backward(model, 3, 1)
    found = gradients(model)
    norm = float(torch.cat([g.flatten() for g in found.values()]).norm())
    apply_gradient_clipping(model, "norm", norm / 2, fsdp_enabled=kind.startswith("fsdp1"))
    return compare(gradients(model), {n: g / 2 for n, g in found.items()})


def loss_scaling(kind):
    """A step, of which rank 1 alone overflows, between two that do not."""
    model, compression = attached(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = (
        ShardedGradScaler(device="cpu", init_scale=2.0**16)
        if kind.startswith("fsdp1")
        else torch.amp.GradScaler("cpu", init_scale=2.0**16)
    )
    start = parameters_of(model)

    def step(number, factor=1.0):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number, rank, 0) * factor).backward()
        scaler.unscale_(optimizer)

    step(3, 2.0**115 if rank == 1 else 1.0)
    seen = any(
        not p.grad.isfinite().all() for p in model.parameters() if p.grad is not None and p.grad.numel()
    )
    scaler.step(optimizer)
    scaler.update()
    found = {
        "seen": everywhere(bool(seen)),
        "skipped": everywhere(
            all(torch.equal(a, b) for a, b in zip(start, parameters_of(model), strict=True))
        ),
        "scale": everywhere(scaler.get_scale()),
        "residuals_finite": everywhere(all(bool(r.isfinite().all()) for r in compression.residuals())),
    }
    step(4)
    found["after"] = compare(gradients(model), reference(4, 1))
    scaler.step(optimizer)
    found["moved"] = everywhere(
        not all(torch.equal(a, b) for a, b in zip(start, parameters_of(model), strict=True))
    )
    return found


def checkpointing(kind):
    """The same step with and without recomputing: what was sent, and the gradients."""
    parameters = "none" if kind in ("ddp", "fsdp1-NO_SHARD") else "int8"
    runs = []
    for checkpointed in (False, True):
        model, compression = attached(kind, checkpointed, parameters=parameters)
        traffic = compression.traffic
        before = dict(traffic.calls), dict(traffic.sent)
        backward(model, 3, 1)
        sent = [
            {op: now[op] - was.get(op, 0) for op in now}
            for now, was in zip((traffic.calls, traffic.sent), before, strict=True)
        ]
        runs.append((sent, gradients(model)))
    (sent, plain), (sent_again, again) = runs
    equal = all(torch.equal(plain[clean(n)], again[clean(n)]) for n in plain)
    return {"sent": sent, "sent_again": sent_again, "equal": everywhere(equal)}


FEATURES = {f.__name__: f for f in (autocast, clipping, loss_scaling, checkpointing)}
results = {}
for kind in sys.argv[1].split(",") if len(sys.argv) > 1 else KINDS:
    results[kind] = {name: feature(kind) for name, feature in FEATURES.items()}
    print(kind, json.dumps(results[kind], indent=1), flush=True)

if rank == 0:
    with open(os.environ["RESULT_FILE"], "w") as file:
        json.dump(results, file)
dist.barrier()
