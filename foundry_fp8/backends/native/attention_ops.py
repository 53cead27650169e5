"""The attention kernels as torch operators (see :mod:`.ops`)."""

import torch
from torch import Tensor

from foundry_fp8.kernels.attention import AttentionShape
from foundry_fp8.kernels.attention import attention_forward as forward_kernel
from foundry_fp8.kernels.attention_backward import attention_backward as backward_kernel
from foundry_fp8.kernels.attention_backward import attention_row_sums
from foundry_fp8.kernels.launch import on_its_device

__all__ = ["attention_backward", "attention_forward"]


@torch.library.custom_op("foundry_fp8::attention_forward", mutates_args=("amax_s",))
@on_its_device
def attention_forward(
    q: Tensor,
    k: Tensor,
    v_t: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    amax_s: Tensor | None,
    sizes: list[int],
    softmax_scale: float,
    left: int | None,
    right: int | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """:func:`foundry_fp8.kernels.attention.attention_forward`. ``sizes``: batch, heads, kv_heads, queries, keys, head_dim."""
    return forward_kernel(
        _shape(sizes, softmax_scale, left, right),
        q,
        k,
        v_t,
        (q_scale, k_scale, v_scale),
        out_dtype=out_dtype,
        segments=None if q_segments is None or k_segments is None else (q_segments, k_segments),
        amax_s=amax_s,
    )


@attention_forward.register_fake
def _(q, k, v_t, q_scale, k_scale, v_scale, q_segments, k_segments, amax_s, sizes, softmax_scale, left,
      right, out_dtype):  # fmt: skip
    batch, heads, _, queries, _, head_dim = sizes
    out = q.new_empty((batch, queries, heads, head_dim), dtype=out_dtype)
    return out, q.new_empty((batch, heads, queries), dtype=torch.float32)


@torch.library.custom_op("foundry_fp8::attention_backward", mutates_args=("amax_dp",))
@on_its_device
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    out: Tensor,
    lse: Tensor,
    q_segments: Tensor | None,
    k_segments: Tensor | None,
    do: Tensor,
    do_t: Tensor,
    do_scale: Tensor,
    dp_scale: Tensor | None,
    amax_dp: Tensor,
    sizes: list[int],
    softmax_scale: float,
    left: int | None,
    right: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`foundry_fp8.kernels.attention_backward.attention_backward`; makes the transposes and row sums that it needs."""
    shape = _shape(sizes, softmax_scale, left, right)
    return backward_kernel(
        shape,
        (q, None if dp_scale is None else _transposed(q)),
        (k, None if dp_scale is None else _transposed(k)),
        v,
        (do, do_t),
        (q_scale, k_scale, v_scale, do_scale),
        lse,
        attention_row_sums(shape, do, do_scale, out),
        out_dtype=out.dtype,
        dp_scale=dp_scale,
        amax_dp=amax_dp,
        segments=None if q_segments is None or k_segments is None else (q_segments, k_segments),
    )


@attention_backward.register_fake
def _(q, k, v, q_scale, k_scale, v_scale, out, lse, q_segments, k_segments, do, do_t, do_scale, dp_scale, amax_dp,
      sizes, softmax_scale, left, right):  # fmt: skip
    batch, _, kv_heads, _, keys, head_dim = sizes
    of_keys = (batch, keys, kv_heads, head_dim)
    return torch.empty_like(out), out.new_empty(of_keys), out.new_empty(of_keys)


def _shape(sizes: list[int], softmax_scale: float, left: int | None, right: int | None) -> AttentionShape:
    batch, heads, kv_heads, queries, keys, head_dim = sizes
    return AttentionShape(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        softmax_scale=softmax_scale,
        left=left,
        right=right,
    )


def _transposed(x: Tensor) -> Tensor:
    """FP8 ``[R, C]`` as contiguous ``[C, R]``; made in the backward, so that it need not be saved."""
    return x.view(torch.uint8).t().contiguous().view(x.dtype)
