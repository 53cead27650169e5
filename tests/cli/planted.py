"""``python -m tests.cli.planted FAILURE STAGE --dry``: one rank of a stage of ``selftest`` with a failure planted in it."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from foundry_fp8.cli.selftest.cluster.__main__ import main

RANK = int(os.environ["RANK"])


def dead_rank():
    from foundry_fp8.cli.selftest.cluster import network

    if RANK == 1:
        network.network = lambda ranks: os.kill(os.getpid(), signal.SIGKILL)


def hanging_rank():
    reduce = dist.all_reduce

    def hang(*args, **kwargs):
        while RANK == 1:
            time.sleep(1)
        return reduce(*args, **kwargs)

    dist.all_reduce = hang


def wrong_kernel():
    from foundry_fp8.distributed import rows

    encode = rows.encode

    def off_by_a_code(x, wire, out=None, **kwargs):
        message = encode(x, wire, out, **kwargs)
        if RANK == 1:
            message.view(torch.uint8)[..., ::64] ^= 0x40
        return message

    rows.encode = off_by_a_code


def wrong_gradient(factor=1.5):
    from foundry_fp8.backends.emulated import backend

    backward = backend._EmulatedLinear.backward

    def wrong(ctx, dy):
        dx, *rest = backward(ctx, dy)
        return (None if dx is None else dx * factor, *rest)

    backend._EmulatedLinear.backward = staticmethod(wrong)


def nan():
    wrong_gradient(float("nan"))


def out_of_memory():
    from foundry_fp8.cli.selftest.cluster import wrappers

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    if RANK == 1:
        wrappers.llama = full


def no_nccl():
    def missing(*args, **kwargs):
        raise RuntimeError("Distributed package doesn't have NCCL built in")

    dist.init_process_group = missing


def slow_link():
    send = dist.send

    def slow(*args, **kwargs):
        time.sleep(0.3 * RANK)
        return send(*args, **kwargs)

    dist.send = slow


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    main(sys.argv[2], "--dry" in sys.argv[3:])
