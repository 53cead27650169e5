"""Worker: every wrapper with gradients and parameters compressed, against the float64 mean of all ranks' gradients.

Argument: ``some`` or ``every`` cell of wrapper x what is compressed x what is done.
"""

import json
import os
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from foundry_fp8.distributed.compression.apply import apply_compressed_communication
from tests.multiprocess.wrapped import (
    COMMON,
    KINDS,
    ORIGINAL,
    backward,
    batch,
    clean,
    compare,
    gradients,
    load,
    norm_of,
    parameters_of,
    rank,
    reference,
    save,
    train,
    world,
    wrap,
)


def resume(kind, options):
    """Four steps at once against two, a checkpoint, a new model, and two more."""
    model = wrap(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compression = apply_compressed_communication(model, **options)
    train(model, optimizer, compression, range(2))
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    residuals = norm_of(compression.residuals())
    save(model, optimizer, compression, folder[0])
    train(model, optimizer, compression, range(2, 4))

    again = wrap(kind)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    compression = apply_compressed_communication(again, **options)
    load(again, optimizer, folder[0])
    train(again, optimizer, compression, range(2, 4))
    equal = all(torch.equal(a, b) for a, b in zip(parameters_of(model), parameters_of(again), strict=True))
    everywhere = [None] * world
    dist.all_gather_object(everywhere, equal)
    return {"bit_exact": all(everywhere), "residuals": residuals}


DONE = {name: ("fp32", "accumulation", "resume") for name in ("gradients", "parameters", "both")}
DONE["none"] = ("fp32", "accumulation")

results = {}
for kind in KINDS:
    cells = results[kind] = {}
    for name, options in {
        "none": {"gradients": "bf16", "warmup": 100},
        "gradients": {"gradients": "int8", "second_leg": "int8"},
        "parameters": {"gradients": "bf16", "warmup": 100, "parameters": "int8"},
        "both": {"gradients": "e4m3", "parameters": "e4m3"},
    }.items():
        if options.get("parameters") and kind in ("ddp", "fsdp1-NO_SHARD"):
            continue
        options = COMMON | options
        for parts, label in ((1, "fp32"), (2, "accumulation")):
            if label not in DONE[name]:
                continue
            model = wrap(kind)
            compression = apply_compressed_communication(model, **options)
            assert apply_compressed_communication(model, **options) is compression
            compression.start_batch(0)
            if kind == "ddp":  # buckets are rebuilt after the first backward
                backward(model, 7, 1)
                model.zero_grad()
            before = compression.traffic.wire_bytes, compression.traffic.logical
            backward(model, 3, parts)
            sent = compression.traffic.wire_bytes - before[0]
            logical = compression.traffic.logical - before[1]
            cells[f"{name}/{label}"] = compare(gradients(model), reference(3, parts))
            cells[f"{name}/{label}"] |= {
                "sent": sent,
                "logical": logical,
                "calls": compression.switch.reductions,
            }
            if name == "parameters":
                with torch.no_grad():
                    model(batch(0, 0, 0)[0])  # evaluation gathers too
            if kind.startswith("fsdp1"):
                with FSDP1.summon_full_params(model, writeback=False):
                    full = {clean(n): p for n, p in model.named_parameters()}
                    cells[f"{name}/{label}"]["state_exact"] = all(
                        torch.equal(full[n], p) for n, p in ORIGINAL.named_parameters()
                    )
        if "resume" in DONE[name]:
            cells[f"{name}/resume"] = resume(kind, options)
    print(kind, json.dumps(cells, indent=1), flush=True)

if rank == 0:
    with open(os.environ["RESULT_FILE"], "w") as file:
        json.dump(results, file)
dist.barrier()
