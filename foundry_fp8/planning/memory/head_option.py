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
    fused: FusedHead, loss_fn: Callable[[], Tensor], device: torch.device, cost_model: CostModel | None
) -> float | None:
    """Seconds of the fused head's forward, which its backward repeats; ``None`` where it does not get its targets, and makes logits."""
    run, found = fused.run, list[float]()

    def timed(*args: Any, **kwargs: Any) -> Any:
        start, counting = clock(device), contextlib.nullcontext(lambda: clock(device) - start)
        with counting if cost_model is None else cost_model.counting() as taken:
            output = run(*args, **kwargs)
            found.extend([taken()] if isinstance(output, DeferredLogits) else [])
        return output

    fused.run = timed  # type: ignore[method-assign]
    with unchanged(device), torch.no_grad():
        loss_fn()
    del fused.run
    return found[-1] if found else None
