"""MPT's flash attention where there is no GPU: a stand-in that holds the bytes that flash attention holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["hold_flash_bytes"]


def hold_flash_bytes(model: nn.Module) -> int:
    """Let every attention of an MPT built with ``attn_impl: torch`` keep what flash attention keeps: q, k, v, output, log-sum-exp.

    For planning alone: causal, without masks, biases, windows or dropout, and its seconds are those of a recompute.

    Returns:
        The number of attentions changed.
    """
    attentions = [
        m for m in model.modules() if callable(getattr(m, "attn_fn", None)) and hasattr(m, "attn_impl")
    ]
    for attention in attentions:
        attention.attn_fn = _attend  # type: ignore[assignment]
    return len(attentions)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, n_heads: int, kv_n_heads: int, *_: Any, **__: Any
) -> Any:
    def heads(x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, -1)).transpose(1, 2)

    q, k, v = heads(query, n_heads), heads(key, kv_n_heads), heads(value, kv_n_heads)
    return _Flash.apply(q, k, v).transpose(1, 2).flatten(2), None, None


class _Flash(torch.autograd.Function):
    """``[B, H, S, D]`` queries with ``[B, G, S, D]`` keys and values; the backward runs the forward again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention; saves its inputs and output, and as much as a log-sum-exp a row."""
        out = _plain(q, k, v)
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q, k and v."""
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors[:3]]
            return torch.autograd.grad(_plain(*inputs), inputs, dy)


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, 1) if times > 1 else x for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
