"""A process group of one rank in this process, as a Composer run leaves one."""

from __future__ import annotations

import torch.distributed
from composer.utils import dist


def one_rank(device: str = "cpu") -> None:
    """Begin it where there is none, with the variables that Composer reads beside a group.

    It is left to the tests to come: destroying a gloo group can hang (``multiprocess/ranks.py`` says why).
    """
    if not torch.distributed.is_initialized():
        dist.initialize_dist("gpu" if device == "cuda" else device)
