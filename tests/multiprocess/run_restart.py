"""Worker: DDP with error feedback, a kill and a restart. Arguments: the checkpoint's folder, and which of the two.

``killed`` saves after two steps, does a third, and loses rank 1 in the backward of the fourth. ``restarted`` goes on from
that checkpoint, and compares with a run that nothing interrupted.
"""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from foundry_fp8.distributed.compression.apply import apply_compressed_communication
from tests.multiprocess.wrapped import (
    COMMON,
    TIMEOUT,
    load,
    norm_of,
    parameters_of,
    rank,
    save,
    train,
    world,
    wrap,
)

CHECKPOINT, TASK = sys.argv[1:]


def start():
    model = wrap("ddp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return (
        model,
        optimizer,
        apply_compressed_communication(model, **COMMON, gradients="int8", second_leg="int8"),
    )


run = start()
if TASK == "killed":
    train(*run, range(2))
    save(*run, CHECKPOINT)
    train(*run, [2])
    if (
        rank == 1
    ):  # the head's gradients come first and the embedding's last: in between, buckets are on the wire
        between = run[0].module.blocks[0].up.weight
        between.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    begin = time.monotonic()
    try:
        train(*run, [3])
    except RuntimeError as error:
        assert time.monotonic() - begin < TIMEOUT + 10, "ended late"
        print(f"ended by: {error}", flush=True)
        sys.exit(5)
    print("reached the end", flush=True)
else:
    load(*run[:2], CHECKPOINT)
    train(*run, range(2, 6))
    whole = start()
    train(*whole, range(2))
    whole[2].forget()  # as it did where the checkpoint was taken
    train(*whole, range(2, 6))
    equal = all(
        torch.equal(a, b) for a, b in zip(parameters_of(run[0]), parameters_of(whole[0]), strict=True)
    )
    everywhere = [None] * world
    dist.all_gather_object(everywhere, equal)
    if rank == 0:
        with open(os.environ["RESULT_FILE"], "w") as file:
            json.dump(
                {"bit_exact": everywhere, "residual": norm_of(run[2].residuals())},
                file,
            )
    dist.barrier()
