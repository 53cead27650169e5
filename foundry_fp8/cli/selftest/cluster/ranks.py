"""One rank of a stage: its group, its device, and checks whose verdict is that of all ranks."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["CANNOT_RUN", "CannotRunError", "Ranks", "relative"]

CANNOT_RUN = 77
"""Exit status of a stage that cannot run here."""


class CannotRunError(Exception):
    """The stage cannot run here; the message says why."""


class Ranks:
    """The process group of a stage.

    ``dry``: gloo on the CPU, small sizes.

    Attributes:
        rank: This process.
        world: How many there are.
        per_node: How many of them run on this node.
        device: Of this rank.
        dtype: Of parameters: bfloat16, and float32 in a dry run.
        rows: The checks so far, ``{"check", "ok", "figures"}``.
    """

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self.rows: list[dict[str, Any]] = []
        self.dtype = torch.float32 if dry else torch.bfloat16
        self.device = torch.device("cpu")
        if not dry:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        backend = "gloo" if dry else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=90))

    def check(self, name: str, ok: bool, figures: str) -> None:
        """Enter one check. Every rank calls it; it holds if it holds on all of them."""
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, (bool(ok), figures))
        wrong = [f"rank {rank}: {said}" for rank, (right, said) in enumerate(everyone) if not right]
        self.rows.append({"check": name, "ok": not wrong, "figures": "; ".join(wrong) or figures})

    def mean(self, x: Tensor) -> Tensor:
        """The mean of a CPU tensor over the ranks."""
        x = x.clone()
        dist.all_reduce(x)
        return x / self.world

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def relative(x: Tensor, exact: Tensor) -> float:
    """The norm of the difference over that of ``exact``."""
    return float((x.double() - exact.double()).norm() / exact.double().norm())
