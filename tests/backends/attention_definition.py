"""The definition of FP8 dot-product attention, unfused: every matrix in memory, every step a line.

The equations are in the docstring of :mod:`foundry_fp8.backends.emulated.attention`, which computes them in blocks and accumulates in float32.

GEMMs here accumulate in float64 and are rounded once to float32. Sums of products of FP8 numbers are then exact (E4M3 x E4M3)
or off by less than 2**-52 of the largest partial sum, so that the result does not depend on the order of summation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from foundry_fp8.backends.emulated.attention import keep_mask
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.numerics.quantize import Quantized

Quantize = Callable[[str, Tensor], Quantized]
"""Quantises a tensor by its name: ``q``, ``k``, ``v``, ``s``, ``o``, ``do``, ``dp``, ``dq``, ``dk``, ``dv``."""


def fp8_gemm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of FP8 tensors, batched, in float64 (see the module's docstring)."""
    return a.double() @ b.double()


def softmax_rows(logits: Tensor) -> Tensor:
    """S of float32 logits ``[..., q, k]``; a row of -Inf (a query that sees nothing) becomes zeros."""
    m = logits.amax(-1, keepdim=True)
    m = torch.where(m == -torch.inf, 0.0, m)
    e = torch.exp(logits - m)
    total = e.sum(-1, keepdim=True, dtype=torch.float64).float()
    return e / torch.where(total == 0, 1.0, total)


def softmax_backward(s: Tensor, ds: Tensor) -> Tensor:
    """``dP = S * (dS - rowsum(S * dS))``, float32."""
    return s * (ds - (s * ds).sum(-1, keepdim=True, dtype=torch.float64).float())


@dataclasses.dataclass(frozen=True)
class ReferenceResult:
    """Outputs of :func:`attention_reference`, and the matrices between."""

    o: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    p: Tensor
    s: Tensor


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None,
    *,
    quantize: Quantize,
    mask: AttentionMask,
    softmax_scale: float,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> ReferenceResult:
    """Forward, and with ``do`` backward.

    Args:
        q: [b, heads, q, d], hp.
        k: [b, kv_heads, k, d], hp.
        v: [b, kv_heads, k, d], hp.
        do: [b, heads, q, d], hp, or ``None``.
        quantize: Quantises by slot.
        mask: What each query sees.
        softmax_scale: Multiplies the logits.
        dropout_p: Probability of dropping a probability.
        seed: 0-d int64, for dropout.

    Returns:
        float32 tensors shaped like the inputs, and P and S [b, heads, q, k].
    """
    b, h, queries, _ = q.shape
    hk, keys = k.shape[1:3]
    q8, k8, v8 = quantize("q", q), quantize("k", k), quantize("v", v)
    k_all, v_all = (x.data.float().repeat_interleave(h // hk, 1) for x in (k8, v8))

    p = fp8_gemm(q8.data, k_all.transpose(2, 3)).float() * (q8.gemm_scale * k8.gemm_scale * softmax_scale)
    seen, bias = mask.block(0, queries, 0, keys, queries, keys, q.device)
    if bias is not None:
        p = p + bias.float()
    if seen is not None:
        p = p.masked_fill(~seen, -torch.inf)
    s = softmax_rows(p)
    dropped = s
    if dropout_p:
        assert seed is not None
        keep = keep_mask(seed, 0, b * h, 0, queries, 0, keys, dropout_p).view(s.shape) / (1.0 - dropout_p)
        dropped = s * keep
    s8 = quantize("s", dropped)
    o = quantize("o", fp8_gemm(s8.data, v_all).float() * (s8.gemm_scale * v8.gemm_scale)).dequantize()
    if do is None:
        return ReferenceResult(o, None, None, None, p, s)

    do8 = quantize("do", do)
    ds = fp8_gemm(do8.data, v_all.transpose(2, 3)).float() * (do8.gemm_scale * v8.gemm_scale)
    if dropout_p:
        ds = ds * keep
    dp8 = quantize("dp", softmax_backward(s, ds))

    def of_group(x: Tensor) -> Tensor:
        return x.view(b, hk, h // hk, keys, -1).sum(2).float()

    dq = fp8_gemm(dp8.data, k_all).float() * (dp8.gemm_scale * k8.gemm_scale * softmax_scale)
    dk = of_group(fp8_gemm(dp8.data.transpose(2, 3), q8.data)) * (
        dp8.gemm_scale * q8.gemm_scale * softmax_scale
    )
    dv = of_group(fp8_gemm(s8.data.transpose(2, 3), do8.data)) * (s8.gemm_scale * do8.gemm_scale)
    return ReferenceResult(
        o,
        quantize("dq", dq).dequantize(),
        quantize("dk", dk).dequantize(),
        quantize("dv", dv).dequantize(),
        p,
        s,
    )
