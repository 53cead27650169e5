"""Checks that every rank is about to do the same thing, and that the process group can do it. Never a hang."""

from __future__ import annotations

import datetime
import itertools
from collections import defaultdict

import torch
import torch.distributed as dist

__all__ = ["AGREEMENT_SECONDS", "agree", "check_all_to_all"]

AGREEMENT_SECONDS = 60.0
"""How long a rank waits for the others to say what they are configured to do."""

_round = itertools.count()


def agree(
    what: str, value: str, *, group: dist.ProcessGroup | None = None, seconds: float | None = None
) -> None:
    """Raise on every rank unless all ranks of ``group`` call this with the same ``value``.

    It goes over the rendezvous store and not over a collective, so that a rank that never comes (because compression
    was asked for on some ranks only) is an error that names it instead of a hang.

    Args:
        what: What is being compared, for the message (a YAML key).
        value: This rank's value, in a form that compares.
        group: All ranks where ``None``.
        seconds: How long to wait; :data:`AGREEMENT_SECONDS` where ``None``.

    Raises:
        RuntimeError: Ranks differ, or some did not answer in time. Both are named.
    """
    store = dist.distributed_c10d._get_default_store()
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    prefix = f"foundry_fp8/agree/{what}/{next(_round)}"
    store.set(f"{prefix}/{dist.get_rank()}", value)
    seconds = AGREEMENT_SECONDS if seconds is None else seconds
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
    values: dict[str, list[int]] = defaultdict(list)
    missing = []
    for rank in ranks:
        left = max(deadline - datetime.datetime.now(), datetime.timedelta(milliseconds=100))
        try:
            store.wait([f"{prefix}/{rank}"], left)
        except RuntimeError:  # a TCPStore's DistStoreError
            missing.append(rank)
            continue
        values[store.get(f"{prefix}/{rank}").decode()].append(rank)
    if missing:
        raise RuntimeError(
            f"{what}: ranks {missing} did not set it up within {seconds:g} s, while ranks "
            f"{sorted(set(ranks) - set(missing))} did. Every rank must ask for it, with the same options."
        )
    if len(values) > 1:
        shown = "; ".join(f"ranks {who}: {said}" for said, who in values.items())
        raise RuntimeError(f"{what} differs between ranks ({shown}). Every rank must ask for the same.")


def check_all_to_all(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise unless a uint8 all-to-all over ``group`` arrives as it should.

    Raises:
        RuntimeError: The backend has no all-to-all, or returned something else than was sent.
    """
    world, rank = group.size(), group.rank()
    sent = torch.tensor([rank * world + to for to in range(world)], device=device).to(torch.uint8)
    received = torch.empty_like(sent)
    try:
        group.alltoall_base(received, sent, [], [], dist.AllToAllOptions()).wait()
    except (RuntimeError, NotImplementedError) as error:
        raise RuntimeError(
            f"Compressed communication needs an all-to-all of uint8, which the process group's backend "
            f"({group.name()}) does not have: {error}. Use nccl or gloo, or leave gradients: none."
        ) from error
    wanted = torch.tensor([by * world + rank for by in range(world)], device=device).to(torch.uint8)
    if not torch.equal(received, wanted):
        raise RuntimeError(
            f"The all-to-all of the backend {group.name()} returned wrong bytes: {received.tolist()}."
        )
