"""A process group of one rank in this process, as a Composer run leaves one."""

from __future__ import annotations

import torch.distributed as dist


def one_rank(device: str = "cpu") -> None:
    """Begin it where there is none. It is left to the tests to come: destroying a gloo group can hang (``multiprocess/ranks.py`` says why)."""
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
