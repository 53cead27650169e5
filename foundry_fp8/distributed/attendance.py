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

from foundry_fp8.compat.bounded_waits import bounded_waits
from foundry_fp8.compat.default_store import default_store
from foundry_fp8.compat.group_timeout import group_timeout
from foundry_fp8.distributed.groups import alone, collective_device

__all__ = ["LIMIT_S", "Attendance", "RanksLost", "limit_of", "out_of_memory"]

LIMIT_S = 60.0
"""The longest wait for another rank; a process group with a shorter limit keeps it."""
GRACE_S = 3.0
"""How long a rank that failed waits for the others to say that they failed too."""


class RanksLost(RuntimeError):
    """Ranks are at different places, so that none of their collectives can go on."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, also where cuBLAS or CUDA itself says so."""
    said = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "CUDA out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(one in str(error) for one in said)


def limit_of(group: dist.ProcessGroup | None = None) -> datetime.timedelta:
    """:data:`LIMIT_S`, or that of ``group`` (the job's where ``None``) where it is shorter."""
    limit = datetime.timedelta(seconds=LIMIT_S)
    with contextlib.suppress(RuntimeError):  # a backend that does not say its own
        limit = min(limit, group_timeout(group))
    return limit


class Attendance:
    """One part of training that all ranks enter together, again and again.

    Args:
        part: What waits, for messages.
    """

    _rounds: ClassVar[dict[str, int]] = defaultdict(int)  # by part: the store outlives one of these

    def __init__(self, part: str) -> None:
        self.part, self.when = part, ""

    def __str__(self) -> str:
        return f"{self.part}{self.when}"

    def say(self, failure: BaseException | None = None) -> None:
        """This rank has come through another round, or has failed in it."""
        self._rounds[self.part] += 1
        if not alone():
            what = "" if failure is None else f"{type(failure).__name__}: {failure}"[:300]
            self._write(dist.get_rank(), f"{self._rounds[self.part]} {what}")

    def all_said(self) -> None:
        """After a failure: wait a little for the others, which may have failed alike; :class:`RanksLost` if they are elsewhere."""
        until = time.monotonic() + GRACE_S
        while (gave_up := self._gave_up()) or self._missing():
            if gave_up or time.monotonic() > until:
                raise self.lost("ranks {} have gone, have stalled, or wait in a collective that this one has left")
            time.sleep(0.05)

    def within_limit(self) -> contextlib.AbstractContextManager[None]:
        """Around what is full of collectives of others, FSDP's: gloo's end after :data:`LIMIT_S`, NCCL's by the job's limit."""
        gloo = not alone() and collective_device().type == "cpu"
        return bounded_waits(limit_of(), self._gave_up) if gloo else contextlib.nullcontext()

    def all_reduce(
        self,
        tensor: Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """In place, with a limit of its own."""
        limit = limit_of(group)
        try:
            with self.within_limit():
                dist.all_reduce(tensor, op, group=group, async_op=True).wait(limit)
        except RuntimeError as error:
            said = f"ranks {{}} did not come within {limit.total_seconds():g} s, or have gone"
            raise self.lost(said) from error

    def lost(self, said: str) -> RanksLost:
        """The error, for the others too: which rank says what of the ranks that are missing, where and when, and what those said that failed."""
        self._write("lost", f"{self._rounds[self.part]}")
        said = said.format(self._missing() or "that were here") + self.failed()
        if dist.get_rank() == 0:
            time.sleep(1)  # the store ends with it, in which the others read whom they have lost
        return RanksLost(f"{self}, rank {dist.get_rank()}: {said}.")

    def failed(self) -> str:
        """The ranks that said that they failed, and with what."""
        return "".join(f"; rank {rank} failed with {what}" for rank, what in self._found().items() if what)

    def _missing(self) -> list[int]:
        found = self._found()  # a question to the store for each rank
        return [rank for rank in range(dist.get_world_size()) if rank not in found]

    def _found(self) -> dict[int, str]:
        """What ranks said in this round or a later one."""
        found, store, world = {}, default_store(), dist.get_world_size()
        try:
            for rank in range(world):
                if store.check([self._key(rank)]):
                    number, _, what = store.get(self._key(rank)).decode().partition(" ")
                    if int(number) >= self._rounds[self.part]:
                        found[rank] = what
        except dist.DistError:  # rank 0 has gone, and the store with it
            return dict.fromkeys(range(1, world), "")
        return found

    def _gave_up(self) -> bool:
        """Whether some rank has found that others are lost."""
        try:
            return bool(default_store().check([self._key("lost")]))
        except dist.DistError:
            return True

    def _write(self, who: int | str, text: str) -> None:
        with contextlib.suppress(dist.DistError):  # who asks finds it gone
            default_store().set(self._key(who), text)

    def _key(self, who: int | str) -> str:
        return f"foundry_fp8/at/{self.part}/{who}"
