"""What a step would hold with ``fused_head``, and what making the logits again would take: an option that a plan shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.activations.fused_head.apply import FusedHead, apply_fused_head
from foundry_fp8.activations.fused_head.logits import DeferredLogits
from foundry_fp8.config import ConfigError
from foundry_fp8.model_structure.wrappers import modules_by_clean_name
from foundry_fp8.planning.memory.cost_model import CostModel
from foundry_fp8.planning.memory.measure import clock, unchanged

__all__ = ["fused_head_applied", "head_seconds"]


@contextlib.contextmanager
def fused_head_applied(model: nn.Module, *, skip: bool) -> Iterator[FusedHead | None]:
    """The model with a fused head, and as it was afterwards; ``None`` where it has no head that can be, has one fused already, or ``skip``."""
    fused = None
    with contextlib.suppress(ConfigError):
        fused = None if skip else apply_fused_head(model)
    if fused is None:
        yield None
        return
    fused.expect(None)  # the targets of the loss are taken for its own: comparing them needs values
    try:
        yield fused
    finally:
        fused.undo()


def head_seconds(
    model: nn.Module,
    fused: FusedHead,
    loss_fn: Callable[[], Tensor],
    device: torch.device,
    cost_model: CostModel | None,
) -> float | None:
    """Seconds of the fused head's forward, which its backward repeats; ``None`` where it does not get its targets, and makes logits."""
    head = modules_by_clean_name(model)[fused.name][1]
    found: list[float] = []
    taken: Callable[[], float]
    with contextlib.ExitStack() as around:

        def before(module: nn.Module, args: Any) -> None:
            nonlocal taken
            taken = around.enter_context(_timed(device) if cost_model is None else cost_model.counting())

        def after(module: nn.Module, args: Any, output: Any) -> None:
            seconds = taken()
            around.close()
            if isinstance(output, DeferredLogits):
                found.append(seconds)

        hooks = head.register_forward_pre_hook(before), head.register_forward_hook(after)
        with hooks[0], hooks[1], unchanged(device), torch.no_grad():
            loss_fn()
    return found[-1] if found else None


@contextlib.contextmanager
def _timed(device: torch.device) -> Iterator[Callable[[], float]]:
    start = clock(device)
    yield lambda: clock(device) - start
