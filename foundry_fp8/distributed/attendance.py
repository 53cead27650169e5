"""Waits that this package adds: every rank says where it is, so that who waits in vain learns of whom."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections import defaultdict
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_fp8.compat.default_store import default_store
from foundry_fp8.compat.group_timeout import group_timeout
from foundry_fp8.distributed.groups import alone

__all__ = ["LIMIT_S", "Attendance", "RanksLost", "out_of_memory"]

LIMIT_S = 60.0
"""The longest wait for another rank; a process group with a shorter limit keeps it."""
GRACE_S = 4.0
"""How long a rank that failed waits for the others to say that they failed too."""


class RanksLost(RuntimeError):
    """Ranks are at different places, so that none of their collectives can go on."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, also where cuBLAS or CUDA itself says so."""
    said = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "CUDA out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(one in str(error) for one in said)


class Attendance:
    """One part of training that all ranks enter together, again and again.

    Args:
        part: What waits, for messages.
    """

    _rounds: ClassVar[dict[str, int]] = defaultdict(int)  # by part: the store outlives one of these

    def __init__(self, part: str) -> None:
        self.part, self.when = part, ""

    def say(self, failure: BaseException | None = None) -> None:
        """This rank has come through another round, or has failed in it."""
        self._rounds[self.part] += 1
        if not alone():
            what = "" if failure is None else f"{type(failure).__name__}: {failure}"[:300]
            default_store().set(self._key(dist.get_rank()), f"{self._rounds[self.part]} {what}")

    def all_said(self) -> None:
        """After a failure: wait a little for the others, which may have failed alike; :class:`RanksLost` if they are elsewhere."""
        until = time.monotonic() + GRACE_S
        while missing := self._missing():
            if time.monotonic() > until:
                raise self.lost(
                    f"ranks {missing} are not here after {GRACE_S:g} s: they wait for this one in a collective"
                )
            time.sleep(0.05)

    def all_reduce(
        self,
        tensor: Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """In place, with a limit of its own."""
        limit = datetime.timedelta(seconds=LIMIT_S)
        with contextlib.suppress(RuntimeError):  # a backend that does not say its own
            limit = min(limit, group_timeout(group))
        try:
            work = dist.all_reduce(tensor, op, group=group, async_op=True)
            work.wait(limit)
        except RuntimeError as error:
            raise self.lost(
                f"ranks {self._missing()} did not come within {limit.total_seconds():g} s, or have gone"
            ) from error

    def lost(self, said: str) -> RanksLost:
        """The error: which rank says it, where and when, and what others said that failed."""
        failed = "".join(
            f"; rank {rank} failed with {found[1]}" for rank, found in self._found().items() if found[1]
        )
        return RanksLost(f"{self.part}{self.when}, rank {dist.get_rank()}: {said}{failed}.")

    def _missing(self) -> list[int]:
        found = self._found()  # a question to the store for each rank
        return [rank for rank in range(dist.get_world_size()) if rank not in found]

    def _found(self) -> dict[int, tuple[int, str]]:
        """What ranks said in this round or a later one."""
        found, store = {}, default_store()
        for rank in range(dist.get_world_size()):
            if store.check([self._key(rank)]):
                number, _, what = store.get(self._key(rank)).decode().partition(" ")
                if int(number) >= self._rounds[self.part]:
                    found[rank] = int(number), what
        return found

    def _key(self, rank: int) -> str:
        return f"foundry_fp8/at/{self.part}/{rank}"
