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
    ranks.check("fused head", error < (1e-5 if ranks.dry else 2e-2), f"{error:.1e} apart")


def compiled(ranks: Ranks) -> None:
    """``torch.compile`` of the FP8 model against eager mode."""
    ids = batch(ranks, 0)
    for recipe in recipes(ranks):
        eager = step(converted(ranks, recipe), ids)
        model = converted(ranks, recipe)
        torch.compiler.reset()
        loss_of(torch.compile(model, backend="aot_eager" if ranks.dry else "inductor"), ids).backward()
        error = relative(flat_gradients(model), eager)
        ranks.check(f"{recipe}: compiled gradients", error < 0.05, f"{error:.1e} from eager mode's")


def transformer_engine(ranks: Ranks) -> None:
    """Each recipe that Transformer Engine runs here, with native kernels beside it."""
    library = load_library()
    if isinstance(library, ImportProblem):
        raise CannotRunError(f"{library.reason}. The native backend does not need it")
    ids = batch(ranks, 0)
    exact = step(llama(ranks), ids)
    for recipe in recipes(ranks, "transformer_engine"):
        error = relative(step(converted(ranks, recipe, backend="transformer_engine"), ids), exact)
        beside = relative(step(converted(ranks, recipe), ids), exact)
        ranks.check(
            f"Transformer Engine, {recipe}",
            error < 0.35,
            f"{error:.3f} from high precision, native {beside:.3f}",
        )
