"""Worker: the three ways that gradients can travel, and which of them a slow link and a slow codec make the run take."""

import json
import os
import time

import torch

from foundry_fp8.distributed.compressed_group import WAYS
from foundry_fp8.distributed.compression import adapt
from foundry_fp8.distributed.compression.apply import apply_compressed_communication
from foundry_fp8.distributed.traffic import Traffic
from tests.multiprocess.wrapped import (
    COMMON,
    backward,
    compare,
    gradients,
    norm_of,
    rank,
    reference,
    train,
    wrap,
)

KINDS = ("ddp", "fsdp1-FULL_SHARD", "fsdp1-NO_SHARD", "fsdp2")
COUNT, TIMED = Traffic.count, Traffic.timed


def one_way(kind, way):
    """One step's gradients against the float64 mean, and the bytes that were sent."""
    model = wrap(kind)
    compression = apply_compressed_communication(model, adapt=False, **COMMON)
    compression.start_batch(0)
    compression.switch.way = way
    before = compression.traffic.wire_bytes
    backward(model, 0, 1)
    sent = compression.traffic.wire_bytes - before
    return {**compare(gradients(model), reference(0, 1)), "sent": sent}


def adapted(kind, *, bytes_per_second=None, seconds_to_code=0.0):
    """Train past the first measurement; the link or the codec is slowed by sleeping."""

    def count(self, op, nbytes):
        COUNT(self, op, nbytes)
        parameters = kind == "fsdp2" and op == "all_gather"  # which travel alike in every way
        if bytes_per_second and not parameters:
            time.sleep(nbytes / bytes_per_second)

    def timed(self, what, device):
        time.sleep(seconds_to_code if what == "quantize" else 0)
        return TIMED(self, what, device)

    Traffic.count, Traffic.timed = count, timed
    try:
        model = wrap(kind)
        compression = apply_compressed_communication(model, **COMMON)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        steps = adapt.START + len(WAYS) * adapt.BATCHES
        train(model, optimizer, compression, range(steps))
        compression.start_batch(steps)
        lost = norm_of(compression.residuals())
        return {
            "way": compression.switch.way,
            "verdict": compression.summary().splitlines()[-1],
            "lost": lost,
        }
    finally:
        Traffic.count, Traffic.timed = COUNT, TIMED


adapt.START, adapt.BATCHES = 1, 2
results = {kind: {way: one_way(kind, way) for way in WAYS} for kind in KINDS}
results["slow link"] = {kind: adapted(kind, bytes_per_second=4e4) for kind in ("ddp", "fsdp2")}
results["slow codec"] = {kind: adapted(kind, seconds_to_code=0.05) for kind in ("ddp", "fsdp2")}
if rank == 0:
    with open(os.environ["RESULT_FILE"], "w") as file:
        json.dump(results, file)
