"""What else changes a step: offload, activation compression, the fused head, Transformer Engine, ``torch.compile``."""

from __future__ import annotations

import torch

import foundry_fp8
from foundry_fp8.backends.transformer_engine.library import ImportProblem, load_library
from foundry_fp8.cli.selftest.cluster.model import (
    batch,
    converted,
    flat_gradients,
    llama,
    loss_of,
    recipes,
    step,
    warmed,
)
from foundry_fp8.cli.selftest.cluster.ranks import CannotRunError, Ranks, relative

__all__ = ["compiled", "features", "transformer_engine"]


def features(ranks: Ranks) -> None:
    """Each on the FP8 model, against the same model without it."""
    ids = batch(ranks, 0)
    plain = step(converted(ranks, "current"), ids)

    offloaded = converted(ranks, "current")
    foundry_fp8.apply_activation_checkpointing(offloaded, policy="offload")
    got = step(offloaded, ids)
    ranks.check("activations in host memory", torch.equal(got, plain), f"{relative(got, plain):.1e} apart")

    packed = converted(ranks, "current")
    foundry_fp8.apply_activation_compression(packed)
    error = relative(step(packed, ids), plain)
    ranks.check("compressed activations", error < 0.1, f"{error:.1e} apart (lossy)")

    fused = converted(ranks, "current")
    foundry_fp8.apply_fused_head(fused)
    error = relative(step(fused, ids), plain)
    ranks.check("fused head", error < (1e-5 if ranks.dry else 0.1), f"{error:.1e} apart")


def compiled(ranks: Ranks) -> None:
    """``torch.compile`` of the FP8 model: as near to high precision as eager mode, whose operands are rounded once more."""
    ids = batch(ranks, 0)
    exact = step(llama(ranks), ids)
    for recipe in recipes(ranks):
        eager = relative(step(warmed(converted(ranks, recipe), ids), ids), exact)
        model = warmed(converted(ranks, recipe), ids)
        torch.compiler.reset()
        loss_of(torch.compile(model, backend="aot_eager" if ranks.dry else "inductor"), ids).backward()
        error = relative(flat_gradients(model), exact)
        figures = f"{error:.3f} from high precision, in eager mode {eager:.3f}"
        ranks.check(f"{recipe}: compiled gradients", error < 1.25 * eager, figures)


def transformer_engine(ranks: Ranks) -> None:
    """Each recipe that Transformer Engine runs here, with native kernels beside it."""
    library = load_library()
    if isinstance(library, ImportProblem):
        raise CannotRunError(f"{library.reason}. The native backend does not need it")
    ids = batch(ranks, 0)
    exact = step(llama(ranks), ids)
    for recipe in recipes(ranks, "transformer_engine"):
        theirs = warmed(converted(ranks, recipe, backend="transformer_engine"), ids)
        error = relative(step(theirs, ids), exact)
        beside = relative(step(warmed(converted(ranks, recipe), ids), ids), exact)
        ranks.check(
            f"Transformer Engine, {recipe}",
            error < 0.35,
            f"{error:.3f} from high precision, native {beside:.3f}",
        )
