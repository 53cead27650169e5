"""Training steps under each wrapper: gradients against an unwrapped model and against high precision, replicas to the bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import foundry_fp8
from foundry_fp8.cli.selftest.cluster.model import (
    batch,
    converted,
    llama,
    loss_of,
    recipes,
    step,
    warmed,
    wrap,
)
from foundry_fp8.cli.selftest.cluster.ranks import CannotRunError, Ranks, relative
from foundry_fp8.distributed.replicas import check_replicas
from foundry_fp8.numerics.recipes import RECIPES

__all__ = ["compressed", "train"]

FP8_ERROR = (1e-3, 0.35)
"""Of all gradients, from high precision: less would not be FP8, more would not be right."""
STEPS = 3


def train(ranks: Ranks, kind: str) -> None:
    """Every recipe under one wrapper, as :func:`~.model.wrap` names it."""
    ids, bound = batch(ranks, 0), 1e-5 if ranks.dry else 2e-2
    exact = ranks.mean(step(llama(ranks), ids))
    for recipe in recipes(ranks):
        # The wrapped model's scales are of all ranks' amaxes.
        of_all = {"name": recipe, "amax_group": "world"} if RECIPES[recipe].uses_history else recipe
        alone = ranks.mean(step(warmed(converted(ranks, of_all), ids), ids))
        model = warmed(wrap(kind, converted(ranks, recipe), ranks), ids)
        got = step(model, ids)
        error, apart = relative(got, alone), relative(got, exact)
        ranks.check(
            f"{recipe}: gradients",
            error < bound and FP8_ERROR[0] < apart < FP8_ERROR[1],
            f"{error:.1e} from the unwrapped model's, {apart:.3f} from high precision",
        )
        _steps(ranks, model, recipe)


def _steps(ranks: Ranks, model: nn.Module, what: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses: list[Tensor] = []
    for number in range(STEPS):
        optimizer.step()  # the first with the gradients that were compared
        optimizer.zero_grad()
        losses.append(loss_of(model, batch(ranks, number)))
        losses[-1].backward()
    finite = all(bool(torch.isfinite(loss)) for loss in losses)
    copies = check_replicas(model, "selftest")
    ranks.check(
        f"{what}: {STEPS} steps", finite, f"loss {losses[-1].item():.3f}; {copies} copies of parameters alike"
    )


def compressed(ranks: Ranks) -> None:
    """Gradients that travel as 8-bit codes."""
    if ranks.world == 1:
        raise CannotRunError("one rank sends nothing")
    ids = batch(ranks, 0)
    alone = ranks.mean(step(converted(ranks, "current"), ids))
    for kind in ("ddp", "fsdp2"):
        model = wrap(kind, converted(ranks, "current"), ranks)
        foundry_fp8.apply_compressed_communication(model, warmup=0, min_bytes=0, scope="all")
        error = relative(step(model, ids), alone)
        figures = f"{error:.1e} from those that are sent whole"
        ranks.check(f"{kind}: compressed gradients", 1e-6 < error < 0.05, figures)
        _steps(ranks, model, kind)
