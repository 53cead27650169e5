"""Worker: two hops under DDP, resumed. Two nodes, as the launcher says."""

import json
import os
import tempfile

import torch
import torch.distributed as dist

from foundry_fp8.distributed.compression.apply import apply_compressed_communication
from tests.multiprocess.wrapped import (
    COMMON,
    backward,
    compare,
    gradients,
    load,
    parameters_of,
    rank,
    reference,
    save,
    train,
    world,
    wrap,
)


def start(options):
    model = wrap("ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, apply_compressed_communication(model, **options)


def gathered(value):
    values = [None] * world
    dist.all_gather_object(values, value)
    return values


results = {}
for case, bound, options in (
    ("int8", 1.5e-2, {"gradients": "int8", "second_leg": "int8"}),
    ("int4, int8 inside", 0.25, {"gradients": "int4", "second_leg": "int8", "inside_node": "int8"}),
):
    options = COMMON | options | {"scope": "inter_node"}
    model, optimizer, compression = start(options)
    backward(model, 3, 1)
    found = results[case] = {
        "direction": compare(gradients(model), reference(3, 1))["direction"],
        "bound": bound,
    }
    optimizer.zero_grad()
    train(model, optimizer, compression, range(2))
    found["residual_numel"] = gathered(sum(r.numel() for r in compression.residuals()))
    found["parameters"] = sum(p.numel() for p in model.parameters())
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    save(model, optimizer, compression, folder[0])
    calls = compression.switch.reductions
    train(model, optimizer, compression, range(2, 4))
    calls = compression.switch.reductions - calls

    again, optimizer, compression = start(options)
    load(again, optimizer, folder[0])
    train(again, optimizer, compression, range(2, 4))
    equal = all(torch.equal(a, b) for a, b in zip(parameters_of(model), parameters_of(again), strict=True))
    found["bit_exact"] = gathered(equal)
    found["buckets_differ"] = compression.switch.reductions != calls

if rank == 0:
    with open(os.environ["RESULT_FILE"], "w") as file:
        json.dump(results, file)
    print(json.dumps(results, indent=1))
dist.barrier()
