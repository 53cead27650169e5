"""Before a model is converted: cuDNN's attention, run once on this machine, beside the emulation of its definition."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_fp8.backends.emulated.attention import EmulatedAttention
from foundry_fp8.layers.attention import (
    AttentionBackend,
    AttentionRecipe,
    FP8DotProductAttention,
    attention_format,
    attention_slots,
)
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.numerics.recipes import DelayedScaling

__all__ = ["check_attention"]

KEY = "algorithms.fp8.attention"
TOKENS, HEADS, KV_HEADS = 256, 4, 2
PASSES = 3
"""Scales follow the amaxes of the pass before."""
NEAR = 1.5
"""How many times as far from exact attention as the emulation it may be: both round the same tensors, in another order of steps."""


@functools.cache
def check_attention(
    native: type[AttentionBackend],
    recipe: AttentionRecipe,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run forward and backward of causal attention of one head size. Once a process; builds two plans.

    Args:
        native: What runs cuDNN.
        recipe: What the model will run.
        head_dim: Its head size.
        dtype: Its compute dtype.
        device: A CUDA device.

    Raises:
        RuntimeError: A result is farther from exact attention than FP8 explains, or an amax is none of that tensor.
    """
    generator = torch.Generator().manual_seed(0)
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "do": HEADS}
    given = [
        torch.randn(1, n, TOKENS, head_dim, dtype=torch.float32, generator=generator, device="cpu").to(
            device, dtype
        )
        for n in heads.values()
    ]
    exact, _ = _run(None, recipe, [x.double() for x in given])
    (ours, amaxes), (emulated, theirs) = (_run(one(), recipe, given) for one in (native, EmulatedAttention))
    where = f"cuDNN's FP8 attention is wrong on this machine ({torch.cuda.get_device_name(device)}, torch {torch.__version__})"
    way_out = "Set attention: false, or install another cuDNN."
    for name, a, b, reference in zip(("O", "dQ", "dK", "dV"), ours, emulated, exact, strict=True):
        error, peer = (float((x.double() - reference).norm() / reference.norm()) for x in (a, b))
        if not error < NEAR * peer:
            said = f"{name} is {error:.2g} of its norm away from exact attention, the emulation {peer:.2g}"
            raise RuntimeError(f"{KEY}: {where}: {said}. {way_out}")
    for slot, found, expected in zip(attention_slots(recipe), amaxes, theirs, strict=True):
        # What cuDNN calls dP holds the softmax's scale, and S may not be divided by its sum yet.
        least, most = (0, torch.inf) if slot in ("s", "dp") else (expected / NEAR, expected * NEAR)
        if not least < found < most:
            said = f"the amax of {slot} is {found:.3g}, the emulation's {expected:.3g}"
            raise RuntimeError(f"{KEY}: {where}: {said}. {way_out}")


def _run(
    runner: AttentionBackend | None, recipe: AttentionRecipe, given: list[Tensor]
) -> tuple[list[Tensor], list[float]]:
    """Output and gradients of the last pass, and its amaxes by slot. Without a runner: of exact attention."""
    scale, mask = given[0].shape[3] ** -0.5, AttentionMask(causal=True)
    timing = DelayedScaling(fp8_format=recipe.fp8_format, amax_history_len=2)
    slots = attention_slots(recipe)
    state = DelayedScalingState(timing, [attention_format(recipe, slot).max for slot in slots])
    state.to(given[0].device)
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    with torch.enable_grad():
        if runner is None:
            keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in leaves[1:])
            out = F.scaled_dot_product_attention(leaves[0], keys, values, is_causal=True)
            return [out.detach(), *torch.autograd.grad(out, leaves, given[3])], []
        attention = FP8DotProductAttention(fqn="self-check", recipe=recipe, backend=runner)
        attention.slots = {slot: state.slot(i) for i, slot in enumerate(slots)}
        for _ in range(PASSES):
            state.roll()
            state.begin_pass()
            out = attention(*leaves, mask=mask, softmax_scale=scale)
            gradients = torch.autograd.grad(out, leaves, given[3])
    return [out.detach(), *gradients], state.amax_history[0].tolist()
