"""Checks that every rank is about to do the same thing, and that the process group can do it. Never a hang."""

from __future__ import annotations

import datetime
import itertools
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from foundry_fp8.compat.default_store import default_store
from foundry_fp8.distributed.attendance import limit_of

__all__ = ["agree", "check_all_to_all"]

_round = itertools.count()


def agree(what: str, value: str) -> None:
    """Raise on every rank unless all ranks of the job call this with the same ``value``.

    It goes over the rendezvous store and not over a collective, so that a rank that never comes (because compression
    was asked for on some ranks only) is an error that names it instead of a hang. Rank 0 reads what all say and writes the verdict, and the
    others read that: as many requests as there are ranks, and not their square. It waits for a minute, or as long as the job's process group would.

    Raises:
        RuntimeError: Ranks differ, or some did not answer in time. Both are named.
    """
    store = default_store()
    prefix, limit = f"foundry_fp8/agree/{what}/{next(_round)}", limit_of()
    store.set(f"{prefix}/{dist.get_rank()}", value)
    if dist.get_rank() == 0:
        store.set(f"{prefix}/verdict", _verdict(store, prefix, what, limit))
    try:
        store.wait([f"{prefix}/0"], limit)
        store.wait([f"{prefix}/verdict"], 2 * limit)  # rank 0 may wait its whole limit for another
    except RuntimeError as error:  # a TCPStore's DistStoreError
        raise RuntimeError(_missing(what, [0], limit)) from error
    verdict = store.get(f"{prefix}/verdict").decode()
    if verdict:
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
    return (
        f"{what}: ranks {ranks} did not set it up within {limit.total_seconds():g} s, while others did. Every rank must ask for "
        "it, with the same options."
    )


def check_all_to_all(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise unless a uint8 all-to-all over ``group`` arrives as it should.

    Raises:
        RuntimeError: The backend has no all-to-all, or returned something else than was sent.
    """
    world, rank = group.size(), group.rank()
    sent = torch.tensor([rank * world + to for to in range(world)], dtype=torch.int64, device=device).to(
        torch.uint8
    )
    received = torch.empty_like(sent)
    try:
        group.alltoall_base(received, sent, [], [], dist.AllToAllOptions()).wait()
    except (RuntimeError, NotImplementedError) as error:
        raise RuntimeError(
            f"Compressed communication needs an all-to-all of uint8, which the process group's backend "
            f"({group.name()}) does not have: {error}. Use nccl or gloo, or leave gradients: none."
        ) from error
    wanted = torch.tensor([by * world + rank for by in range(world)], dtype=torch.int64, device=device).to(
        torch.uint8
    )
    if not torch.equal(received, wanted):
        raise RuntimeError(
            f"The all-to-all of the backend {group.name()} returned wrong bytes: {received.tolist()}."
        )
