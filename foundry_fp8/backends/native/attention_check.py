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
    q, k, v, do = (
        torch.randn(1, TOKENS, heads, head_dim, generator=generator, device="cpu").transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    given = [x.to(device, dtype) for x in (q, k, v, do * 1e-3)]
    exact = _exact(*(x.double() for x in given))
    (ours, state), (emulated, theirs) = (
        _run(runner, recipe, given) for runner in (native(), EmulatedAttention())
    )
    for name, a, b, reference in zip(("O", "dQ", "dK", "dV"), ours, emulated, exact, strict=True):
        error, peer = (float((x.double() - reference).norm() / reference.norm()) for x in (a, b))
        if not error < NEAR * peer:
            raise _wrong(f"{name} is {error:.2g} of its norm away from exact attention, the emulation {peer:.2g}", device)  # fmt: skip
    for slot, a, b in zip(attention_slots(recipe), state.amax_history[-1], theirs.amax_history[-1], strict=True):  # fmt: skip
        # What cuDNN calls dP may hold the softmax's scale or not, and S may not be divided by its sum yet.
        least, most = (0.0, torch.inf) if slot in ("s", "dp") else (float(b) / NEAR, float(b) * NEAR)
        if not least < float(a) < most:
            raise _wrong(f"the amax of {slot} is {float(a):.3g}, the emulation's {float(b):.3g}", device)


def _wrong(said: str, device: torch.device) -> RuntimeError:
    return RuntimeError(
        f"algorithms.fp8.attention: cuDNN's FP8 attention is wrong on this machine ({torch.cuda.get_device_name(device)}, torch "
        f"{torch.__version__}): {said}. Set attention: false, or install another cuDNN."
    )


def _run(
    runner: AttentionBackend, recipe: AttentionRecipe, given: list[Tensor]
) -> tuple[list[Tensor], DelayedScalingState]:
    attention = FP8DotProductAttention(fqn="self-check", recipe=recipe, backend=runner)
    slots = attention_slots(recipe)
    timing = DelayedScaling(fp8_format=recipe.fp8_format, amax_history_len=2)
    state = DelayedScalingState(timing, [attention_format(recipe, slot).max for slot in slots])
    state.to(given[0].device)
    attention.slots = {slot: state.slot(i) for i, slot in enumerate(slots)}
    with torch.enable_grad():
        for _ in range(PASSES):
            state.roll()
            state.begin_pass()
            leaves = [x.detach().requires_grad_() for x in given[:3]]
            out = attention(
                *leaves, mask=AttentionMask(causal=True), softmax_scale=leaves[0].shape[3] ** -0.5
            )
            gradients = torch.autograd.grad(out, leaves, given[3])
    state.roll()
    return [out.detach(), *gradients], state


def _exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in leaves[1:])
        out = F.scaled_dot_product_attention(leaves[0], keys, values, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, do)]
