"""Waits that this package adds: every rank says where it is, or what it is about to do, so that who waits in vain learns of whom."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from collections import defaultdict
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_fp8.compat.bounded_waits import bounded_waits
from foundry_fp8.compat.process_group import default_store, group_timeout
from foundry_fp8.distributed.mesh import alone, collective_device

__all__ = ["LIMIT_S", "Attendance", "RanksLost", "agree", "check_all_to_all", "out_of_memory"]

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
                raise self.lost("ranks {} have gone, have stalled, or wait where this one is no more")
            time.sleep(0.05)

    def within_limit(self) -> contextlib.AbstractContextManager[None]:
        """Around what is full of collectives of others, FSDP's: gloo's end after :data:`LIMIT_S`, NCCL's by the job's limit."""
        gloo = not alone() and collective_device().type == "cpu"
        return bounded_waits(limit_of().total_seconds(), self._gave_up) if gloo else contextlib.nullcontext()

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
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
        return RanksLost(f"{self}, rank {dist.get_rank()}: {said}.")

    def failed(self) -> str:
        """The ranks that said that they failed, and with what."""
        said = "".join(f"; rank {rank} failed with {what}" for rank, what in self._found().items() if what)
        time.sleep(1 if dist.get_rank() == 0 else 0)  # the store ends with it, in which the others read
        return said

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


_agreements = itertools.count()


def agree(what: str, value: str) -> None:
    """Raise on every rank unless all ranks of the job call this with the same ``value``.

    It goes over the rendezvous store and not over a collective, so that a rank that never comes (because compression
    was asked for on some ranks only) is an error that names it instead of a hang. Rank 0 reads what all say and writes the verdict, and the
    others read that: as many requests as there are ranks, and not their square. It waits for a minute, or as long as the job's process group would.

    Raises:
        RuntimeError: Ranks differ, or some did not answer in time. Both are named.
    """
    store = default_store()
    prefix, limit = f"foundry_fp8/agree/{what}/{next(_agreements)}", limit_of()
    store.set(f"{prefix}/{dist.get_rank()}", value)
    if dist.get_rank() == 0:
        store.set(f"{prefix}/verdict", _verdict(store, prefix, what, limit))
    try:
        store.wait([f"{prefix}/0"], limit)
        store.wait([f"{prefix}/verdict"], 2 * limit)  # rank 0 may wait its whole limit for another
    except RuntimeError as error:  # a TCPStore's DistStoreError
        raise RuntimeError(_missing(what, [0], limit)) from error
    if verdict := store.get(f"{prefix}/verdict").decode():
        time.sleep(1 if dist.get_rank() == 0 else 0)  # as in failed
        raise RuntimeError(verdict)


def _verdict(store: Any, prefix: str, what: str, limit: datetime.timedelta) -> str:
    """What is wrong with what the ranks say; nothing if they agree."""
    ranks = range(dist.get_world_size())
    keys = [f"{prefix}/{rank}" for rank in ranks]
    try:
        store.wait(keys, limit)
    except RuntimeError:
        return _missing(what, [rank for rank in ranks if not store.check([keys[rank]])], limit)
    values: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        values[store.get(keys[rank]).decode()].append(rank)
    if len(values) == 1:
        return ""
    shown = "; ".join(f"ranks {who}: {said}" for said, who in values.items())
    return f"{what} differs between ranks ({shown}). Every rank must ask for the same."


def _missing(what: str, ranks: list[int], limit: datetime.timedelta) -> str:
    said = f"{what}: ranks {ranks} did not set it up within {limit.total_seconds():g} s, while others did"
    return f"{said}. Every rank must ask for it, with the same options."


def check_all_to_all(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise unless a uint8 all-to-all over ``group`` arrives as it should.

    Raises:
        RuntimeError: The backend has no all-to-all, or returned something else than was sent.
    """
    world, rank = group.size(), group.rank()
    others = torch.arange(world, device=device)
    sent, wanted = (rank * world + others).to(torch.uint8), (others * world + rank).to(torch.uint8)
    received = torch.empty_like(sent)
    try:
        group.alltoall_base(received, sent, [], [], dist.AllToAllOptions()).wait()
    except (RuntimeError, NotImplementedError) as error:
        raise RuntimeError(
            f"Compressed communication needs an all-to-all of uint8, which the process group's backend "
            f"({group.name()}) does not have: {error}. Use nccl or gloo, or leave gradients: none."
        ) from error
    if not torch.equal(received, wanted):
        raise RuntimeError(f"The all-to-all of {group.name()} returned wrong bytes: {received.tolist()}.")
