"""cuDNN's attention as torch operators (see :mod:`.ops`): FP8 and scales in, the model's dtype out."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_fp8.backends.native import cudnn_graphs
from foundry_fp8.backends.native.cudnn_graphs import AttentionSizes, Role
from foundry_fp8.backends.native.ops import operator
from foundry_fp8.backends.native.plan import FORMATS
from foundry_fp8.kernels.dequantize import dequantize
from foundry_fp8.kernels.zeros import statistics
from foundry_fp8.numerics.formats import E4M3

__all__ = ["attention_backward", "attention_forward"]


def _by_role(**tensors: Tensor) -> dict[Role, Tensor]:
    return {Role[name]: tensor for name, tensor in tensors.items()}


@operator(mutates=("amax_s", "amax_o"))
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    s_scale: Tensor,
    o_scale: Tensor,
    amax_s: Tensor | None,
    amax_o: Tensor | None,
    sizes: list[int],
    softmax_scale: float,
    causal: bool,
    fmt: str,
    deterministic: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Causal or whole attention of FP8 operands.

    ``q``, ``k``, ``v``: E4M3, rows of ``[b * tokens, heads * d]``, after which more may follow, each with what it is multiplied by to leave FP8.
    ``s_scale``, ``o_scale``: what probabilities and output are multiplied by to enter it; their amaxes are raised in place. ``sizes``: batch,
    heads, kv_heads, tokens, head_dim. ``fmt``, ``deterministic``: the gradients' format, and their algorithm.

    Returns:
        The output [b, tokens, heads, d]; the same in E4M3; the softmax's statistics [b, heads, tokens, 1]; what the FP8 output is multiplied
        by to leave it, and what probabilities are.
    """
    batch, heads, kv_heads, tokens, head_dim = sizes
    options = (softmax_scale, causal, FORMATS[fmt], deterministic)
    shape = AttentionSizes(batch, heads, kv_heads, tokens, head_dim, *options)
    o = torch.empty((batch, tokens, heads, head_dim), dtype=E4M3.dtype, device=q.device)
    stats = torch.empty(shape.layout(Role.stats)[0], dtype=torch.float32, device=q.device)
    (piece,) = statistics(q.device, 1)
    found_s, found_o, descale_o = piece.stats.unbind()
    descale_s = s_scale.reciprocal()
    tensors = _by_role(
        q=q, k=k, v=v, o=o, stats=stats, descale_q=q_scale, descale_k=k_scale, descale_v=v_scale,
        descale_s=descale_s, scale_s=s_scale, scale_o=o_scale, amax_s=found_s, amax_o=found_o,
    )  # fmt: skip
    cudnn_graphs.run("forward", shape, tensors)
    (out,) = dequantize(
        [o], o_scale, [found_o], out_dtype, slot=amax_o, other=(found_s, amax_s), scale_inv=descale_o
    )
    return out, o, stats, descale_o, descale_s


@attention_forward.register_fake
def _(q, k, v, q_scale, k_scale, v_scale, s_scale, o_scale, amax_s, amax_o, sizes, softmax_scale, causal, fmt,
      deterministic, out_dtype):  # fmt: skip
    batch, heads, _, tokens, head_dim = sizes
    out = q.new_empty((batch, tokens, heads, head_dim), dtype=out_dtype)
    stats, number = (q.new_empty(shape, dtype=torch.float32) for shape in ((batch, heads, tokens, 1), ()))
    return out, torch.empty_like(out, dtype=q.dtype), stats, number, torch.empty_like(number)


@operator(mutates=("amax_dp", "amax_dqkv"))
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    stats: Tensor,
    do: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    descale_o: Tensor,
    descale_s: Tensor,
    do_scale: Tensor,
    s_scale: Tensor,
    dp_scale: Tensor,
    dqkv_scale: Tensor,
    amax_dp: Tensor | None,
    amax_dqkv: Tensor | None,
    sizes: list[int],
    softmax_scale: float,
    causal: bool,
    fmt: str,
    deterministic: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`attention_forward`, in ``out_dtype``: dQ [b, tokens, heads, d], dK and dV [b, tokens, kv_heads, d].

    ``do``, ``do_scale``: dO as rows in FP8, and what it is multiplied by to leave it; ``dp_scale``, ``dqkv_scale``: what the gradients of
    the logits, and dQ, dK and dV, are multiplied by to enter FP8; ``amax_dp`` and ``amax_dqkv`` are raised in place.
    """
    batch, heads, kv_heads, tokens, head_dim = sizes
    options = (softmax_scale, causal, FORMATS[fmt], deterministic)
    shape = AttentionSizes(batch, heads, kv_heads, tokens, head_dim, *options)
    parts = [
        torch.empty((batch, tokens, of, head_dim), dtype=do.dtype, device=q.device)
        for of in (heads, kv_heads, kv_heads)
    ]
    of_dp, of_dqkv = statistics(q.device, 2)
    found_dp, found = of_dp.stats.select(0, 0), of_dqkv.stats.unbind()
    tensors = _by_role(
        q=q, k=k, v=v, o=o, stats=stats, do=do, dq=parts[0], dk=parts[1], dv=parts[2],
        descale_q=q_scale, descale_k=k_scale, descale_v=v_scale, descale_o=descale_o, descale_do=do_scale,
        descale_s=descale_s, descale_dp=dp_scale.reciprocal(), scale_s=s_scale, scale_dp=dp_scale,
        scale_dq=dqkv_scale, scale_dk=dqkv_scale, scale_dv=dqkv_scale,
        amax_dp=found_dp, amax_dq=found[0], amax_dk=found[1], amax_dv=found[2],
    )  # fmt: skip
    cudnn_graphs.run("backward", shape, tensors)
    dq, dk, dv = dequantize(parts, dqkv_scale, found, out_dtype, slot=amax_dqkv, other=(found_dp, amax_dp))
    return dq, dk, dv


@attention_backward.register_fake
def _(q, k, v, o, stats, do, q_scale, k_scale, v_scale, descale_o, descale_s, do_scale, s_scale, dp_scale, dqkv_scale,
      amax_dp, amax_dqkv, sizes, softmax_scale, causal, fmt, deterministic, out_dtype):  # fmt: skip
    batch, heads, kv_heads, tokens, head_dim = sizes
    dq, dk, dv = (
        q.new_empty((batch, tokens, of, head_dim), dtype=out_dtype) for of in (heads, kv_heads, kv_heads)
    )
    return dq, dk, dv
