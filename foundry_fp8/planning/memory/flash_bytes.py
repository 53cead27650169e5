"""Flash attention where there is no GPU: a stand-in that holds the bytes that flash attention holds."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foundry_fp8.surgery.attention_hosts import HuggingFaceHost, by_heads, register_attention

__all__ = ["hold_flash_bytes"]

HUGGING_FACE_IMPLEMENTATION = "flash_bytes"
"""The name under which the stand-in is in transformers' registry of attention functions."""


def hold_flash_bytes(model: nn.Module) -> int:
    """Let every attention keep what flash attention keeps: q, k, v, output, log-sum-exp.

    Of an MPT built with ``attn_impl: torch``, and of Hugging Face models without flash attention. For planning alone: causal, without
    masks, biases, windows or dropout, and its seconds are those of a recompute.

    Returns:
        The number of attentions changed.
    """
    changed, hugging_face = 0, HuggingFaceHost()
    for module in model.modules():
        if callable(getattr(module, "attn_fn", None)) and hasattr(module, "attn_impl"):
            module.attn_fn = _attend  # type: ignore[assignment]
        elif hugging_face.recognises(module):
            register_attention(module, HUGGING_FACE_IMPLEMENTATION, _hugging_face)
            config: Any = module.config
            own = copy.copy(config)
            own._attn_implementation = HUGGING_FACE_IMPLEMENTATION
            module.config = own
            config._attn_implementation = "flash_attention_2"  # the model's: it makes no dense mask
        else:
            continue
        changed += 1
    return changed


def _attend(
    query: Tensor, key: Tensor, value: Tensor, n_heads: int, kv_n_heads: int, *_: Any, **__: Any
) -> Any:
    q, k, v = by_heads((query, n_heads), (key, kv_n_heads), (value, kv_n_heads))
    return _Flash.apply(q, k, v).transpose(1, 2).flatten(2), None, None


def _hugging_face(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Transformers' signature: ``[B, H, S, D]`` to ``[B, S, H, D]``; like it, casts what a norm of queries or keys left in float32."""
    return _Flash.apply(query.to(value.dtype), key.to(value.dtype), value).transpose(1, 2), None


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
