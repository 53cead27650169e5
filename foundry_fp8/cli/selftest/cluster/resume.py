"""A sharded checkpoint, and a new process that goes on from it bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import foundry_fp8
from foundry_fp8.cli.selftest.cluster.model import batch, converted, loss_of, wrap
from foundry_fp8.cli.selftest.cluster.ranks import CannotRunError, Ranks

__all__ = ["resume", "save"]

STEPS = 2


def save(ranks: Ranks) -> None:
    """Train, save, train one step more and note where that led."""
    model, optimizer = _made(ranks)
    for number in range(STEPS):
        _step(ranks, model, optimizer, number)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "fp8": foundry_fp8.training_state(model)}
    dcp.save(state, checkpoint_id=_folder(ranks))
    _step(ranks, model, optimizer, STEPS)
    _noted(ranks).write_text(_digest(model))
    ranks.check("sharded checkpoint", True, f"written by {ranks.world} ranks")


def resume(ranks: Ranks) -> None:
    """Load it in this process and take the same step."""
    if not (_folder(ranks) / ".metadata").exists() or not _noted(ranks).exists():
        raise CannotRunError(
            "this rank does not see the checkpoint: give --output a folder that all nodes share"
        )
    model, optimizer = _made(ranks)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "fp8": foundry_fp8.training_state(model)}
    dcp.load(state, checkpoint_id=_folder(ranks))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    _step(ranks, model, optimizer, STEPS)
    same = _digest(model) == _noted(ranks).read_text()
    ranks.check("resume", same, f"parameters {'the same bits' if same else 'differ'} after one more step")


def _made(ranks: Ranks) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap("fsdp2", converted(ranks, "delayed"), ranks)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _step(ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, batch(ranks, number)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _folder(ranks: Ranks) -> Path:
    return ranks.folder / "checkpoint"


def _noted(ranks: Ranks) -> Path:
    return ranks.folder / f"checkpoint-digest-{ranks.rank}.txt"


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for _, p in sorted(model.named_parameters()):
        local = (p.to_local() if isinstance(p, DTensor) else p).detach()
        found.update(local.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()
