"""FP8 attention, backward: dQ, dK and dV, with the probabilities computed again from the forward's logarithms.

====== ============================================== ====================================================
step   equation                                       operands of the product
====== ============================================== ====================================================
S      ``exp2(logits - lse)``, float32                Q, K in E4M3
dV     ``dV = e4m3(2^8 S)^T dO / 2^8``                S in E4M3, dO in the gradients' format
dS     ``dS = dO V^T``                                dO, V
dP     ``dP = S (dS - D)``, ``D = rowsum(dO O)``      float32, with the dO that was quantised
dQ     ``dQ = softmax_scale dP K``                    dP in the gradients' format, K
dK     ``dK = softmax_scale dP^T Q``                  the same, Q
====== ============================================== ====================================================

Two kernels, neither of which adds atomically, so that every run gives the same bits: one takes a tile of queries and walks over the keys
(dQ, and the amax of dP), one takes a tile of keys and walks over the queries of all heads that share them (dK, dV).

Every FP8 operand stands contiguous along what its product contracts: the transposed copies are of Q, K and dO. With dP in bfloat16 the last
two products are bfloat16's, of the values of K and Q, which it holds exactly; it has float32's range, so that dP needs no scale, and both layouts,
so that K and Q need no copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.attention import P_SCALE, AttentionShape, Tile, seen_keys
from foundry_fp8.kernels.launch import CONTRACTED
from foundry_fp8.kernels.scales import is_inf, magnitude, reciprocal
from foundry_fp8.numerics.formats import E4M3, Float8Format, cast

__all__ = ["attention_backward", "attention_backward_reference", "attention_row_sums"]

ROW_TILES = {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2)}
KEY_TILES = {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2)}
"""Of dQ's kernel, and of dK's and dV's, by ``block_d``."""

SUM_ROWS = 32
LN_2 = tl.constexpr(0.6931471805599453)


def attention_row_sums(shape: AttentionShape, do: Tensor, do_scale: Tensor, out: Tensor) -> Tensor:
    """D, the sum over head_dim of dO O, float32 ``[batch, heads, queries]``.

    Args:
        shape: Sizes.
        do: FP8 ``[>= batch * queries, heads * head_dim]``, contiguous.
        do_scale: What its values are multiplied with, one float32 element.
        out: hp ``[batch, queries, heads, head_dim]``, contiguous.
    """
    sums = torch.empty((shape.batch, shape.heads, shape.queries), dtype=torch.float32, device=do.device)
    grid = (triton.cdiv(shape.queries, SUM_ROWS), shape.batch * shape.heads)
    _row_sums_kernel[grid](
        do,
        do_scale,
        out,
        sums,
        shape.queries,
        shape.heads,
        D=shape.head_dim,
        BLOCK_D=shape.block_d,
        ROWS=SUM_ROWS,
        **CONTRACTED,
    )
    return sums


def attention_backward(
    shape: AttentionShape,
    q: tuple[Tensor, Tensor | None],
    k: tuple[Tensor, Tensor | None],
    v: Tensor,
    do: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    sums: Tensor,
    *,
    out_dtype: torch.dtype,
    dp_scale: Tensor | None,
    amax_dp: Tensor,
    segments: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`foundry_fp8.kernels.attention.attention_forward`.

    Args:
        shape: As in the forward.
        q: As in the forward, and transposed (``None`` where dP is bfloat16).
        k: The same.
        v: E4M3 ``[>= batch * keys, kv_heads * head_dim]``, contiguous.
        do: The output's gradient, quantised, as ``q``.
        scales: Of q, k, v and do: what their values are multiplied with.
        lse: The forward's second result.
        sums: :func:`attention_row_sums`.
        out_dtype: Of dQ, dK and dV.
        dp_scale: What dP is multiplied with before it is rounded to the format of ``do``, one float32 element; ``None``: dP is rounded to
            bfloat16.
        amax_dp: One float32 element, 0: raised to the largest magnitude of dP.
        segments: As in the forward.

    Returns:
        ``[batch, queries, heads, head_dim]`` and twice ``[batch, keys, kv_heads, head_dim]``.
    """
    of_queries = (shape.batch, shape.queries, shape.heads, shape.head_dim)
    of_keys = (shape.batch, shape.keys, shape.kv_heads, shape.head_dim)
    dq, dk, dv = (
        torch.empty(size, dtype=out_dtype, device=q[0].device) for size in (of_queries, of_keys, of_keys)
    )
    given = (
        *q,
        *k,
        v,
        *do,
        *scales,
        dp_scale,
        *(segments or (None, None)),
        lse,
        sums,
        amax_dp,
    )
    strides = tuple(0 if t is None else t.stride(0) for t in (q[1], k[1], do[1]))
    tile = ROW_TILES[shape.block_d]
    _dq_kernel[(triton.cdiv(shape.queries, tile.queries), shape.batch * shape.heads)](
        *given, dq, *strides, **shape.launch(), **tile.launch()
    )
    tile = KEY_TILES[shape.block_d]
    _dkdv_kernel[(triton.cdiv(shape.keys, tile.keys), shape.batch * shape.kv_heads)](
        *given, dk, dv, *strides, **shape.launch(), **tile.launch()
    )
    return dq, dk, dv


def attention_backward_reference(
    shape: AttentionShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    scales: tuple[Tensor, Tensor, Tensor, Tensor],
    seen: Tensor,
    out: Tensor,
    *,
    dp_scale: Tensor | None,
    do_format: Float8Format,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What :func:`attention_backward` computes, with every matrix in memory and float64 sums.

    Args:
        shape: Sizes.
        q: FP8 values ``[batch, heads, queries, head_dim]``.
        k: The same ``[batch, heads, keys, head_dim]``, each key head as often as queries share it.
        v: As ``k``.
        do: As ``q``.
        scales: Of q, k, v and do.
        seen: bool, broadcasts to ``[batch, heads, queries, keys]``.
        out: The forward's result ``[batch, heads, queries, head_dim]``.
        dp_scale: As in :func:`attention_backward`.
        do_format: The gradients' format.

    Returns:
        dQ ``[batch, heads, queries, head_dim]``, dK and dV ``[batch, kv_heads, keys, head_dim]``, dP and S, float64.
    """
    q, k, v, do = (x.double() * scale.double() for x, scale in zip((q, k, v, do), scales, strict=True))
    logits = (q @ k.transpose(2, 3)) * shape.softmax_scale
    logits = logits.masked_fill(~seen, -torch.inf)
    most = logits.amax(-1, keepdim=True)
    s = torch.exp(logits - torch.where(most == -torch.inf, 0.0, most))
    total = s.sum(-1, keepdim=True)
    s = s / torch.where(total == 0, 1.0, total)
    s8 = cast(s.float() * P_SCALE.value, E4M3).double() / P_SCALE.value
    dp = s * (do @ v.transpose(2, 3) - (do * out.double()).sum(-1, keepdim=True))
    if dp_scale is None:
        dp8 = dp.float().bfloat16().double()
    else:
        dp8 = cast(dp.float() * dp_scale.float(), do_format).double() / dp_scale.double()

    def of_key_heads(x: Tensor) -> Tensor:
        return x.unflatten(1, (shape.kv_heads, -1)).sum(2)

    dk, dv = of_key_heads(dp8.transpose(2, 3) @ q), of_key_heads(s8.transpose(2, 3) @ do)
    return dp8 @ k * shape.softmax_scale, dk * shape.softmax_scale, dv, dp, s


@triton.jit
def _row_sums_kernel(
    do_ptr,
    do_scale_ptr,
    out_ptr,
    sums_ptr,
    Q,
    H,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    batch, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    rows, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = (rows < Q)[:, None] & (d < D)[None, :]
    offsets = ((batch * Q + rows) * H + head)[:, None] * D + d[None, :]
    do = tl.load(do_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    sums = tl.sum(do * out, axis=1) * tl.load(do_scale_ptr)
    tl.store(sums_ptr + (batch * H + head) * Q + rows, sums, mask=rows < Q)


@triton.jit
def _dq_kernel(
    q_ptr,
    qt_ptr,
    k_ptr,
    kt_ptr,
    v_ptr,
    do_ptr,
    dot_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    do_scale_ptr,
    dp_scale_ptr,
    q_segments_ptr,
    k_segments_ptr,
    lse_ptr,
    sums_ptr,
    amax_ptr,
    dq_ptr,
    qt_stride,
    kt_stride,
    dot_stride,
    Q,
    K,
    H,
    HK,
    left,
    right,
    scale_log2,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    batch, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    kv_head = head // (H // HK)
    shift = K - Q
    rows, d = first_row + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    inside = (rows < Q)[:, None] & (d < D)[None, :]
    base, row_offsets = (batch * Q * H + head) * D, rows[:, None] * (H * D) + d[None, :]
    q = tl.load(q_ptr + base + row_offsets, mask=inside, other=0.0)
    do = tl.load(do_ptr + base + row_offsets, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + (batch * H + head) * Q + rows, mask=rows < Q, other=float("inf"))
    sums = tl.load(sums_ptr + (batch * H + head) * Q + rows, mask=rows < Q, other=0.0)
    k_scale = tl.load(k_scale_ptr)
    logit_scale = tl.load(q_scale_ptr) * k_scale * scale_log2
    ds_scale = tl.load(do_scale_ptr) * tl.load(v_scale_ptr)
    dp_scale = 1.0
    if dp_scale_ptr is not None:
        dp_scale = tl.load(dp_scale_ptr)

    last, first = K, 0
    if right is not None:
        last = tl.minimum(K, tl.maximum(first_row + BLOCK_Q + shift + right, 0))
    if left is not None:
        first = tl.maximum(first_row + shift - left, 0)
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    amax = tl.zeros((BLOCK_Q,), tl.float32)
    for block in range(first // BLOCK_K, tl.cdiv(last, BLOCK_K)):
        columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
        here = (columns < K)[None, :] & (d < D)[:, None]
        kv_base, offsets = (batch * K * HK + kv_head) * D, columns[None, :] * (HK * D) + d[:, None]
        k = tl.load(k_ptr + kv_base + offsets, mask=here, other=0.0)
        v = tl.load(v_ptr + kv_base + offsets, mask=here, other=0.0)
        logits = tl.dot(q, k) * logit_scale
        seen = seen_keys(rows, columns, Q, K, left, right, q_segments_ptr, k_segments_ptr, batch)
        s = tl.exp2(tl.where(seen, logits, float("-inf")) - lse[:, None])
        dp = s * (tl.dot(do, v) * ds_scale - sums[:, None])
        amax = tl.maximum(amax, tl.max(magnitude(dp), axis=1))
        if dp_scale_ptr is None:
            dq += tl.dot(dp.to(tl.bfloat16), tl.trans(k).to(tl.bfloat16))
        else:
            kt_base = kt_ptr + (kv_head * D).to(tl.int64) * kt_stride + batch * K
            k_t = tl.load(
                kt_base + d[None, :] * kt_stride + columns[:, None],
                mask=(columns < K)[:, None] & (d < D)[None, :],
                other=0.0,
            )
            dq += tl.dot((dp * dp_scale).to(do_ptr.dtype.element_ty), k_t)

    largest = tl.max(amax, axis=0)
    tl.atomic_max(amax_ptr, largest, sem="relaxed")
    # NaN where dP held an Inf, which saturation would hide.
    inverse = tl.where(is_inf(largest), float("nan"), reciprocal(dp_scale))
    dq = dq * (inverse * k_scale * scale_log2 * LN_2)
    tl.store(dq_ptr + base + row_offsets, dq.to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dkdv_kernel(
    q_ptr,
    qt_ptr,
    k_ptr,
    kt_ptr,
    v_ptr,
    do_ptr,
    dot_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    do_scale_ptr,
    dp_scale_ptr,
    q_segments_ptr,
    k_segments_ptr,
    lse_ptr,
    sums_ptr,
    amax_ptr,
    dk_ptr,
    dv_ptr,
    qt_stride,
    kt_stride,
    dot_stride,
    Q,
    K,
    H,
    HK,
    left,
    right,
    scale_log2,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first_column = tl.program_id(0) * BLOCK_K
    batch, kv_head = (tl.program_id(1) // HK).to(tl.int64), tl.program_id(1) % HK
    shift = K - Q
    columns, d = first_column + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    inside = (columns < K)[:, None] & (d < D)[None, :]
    base = (batch * K * HK + kv_head) * D
    offsets = columns[:, None] * (HK * D) + d[None, :]
    k = tl.load(k_ptr + base + offsets, mask=inside, other=0.0)
    v = tl.load(v_ptr + base + offsets, mask=inside, other=0.0)
    q_scale, do_scale = tl.load(q_scale_ptr), tl.load(do_scale_ptr)
    logit_scale = q_scale * tl.load(k_scale_ptr) * scale_log2
    ds_scale = do_scale * tl.load(v_scale_ptr)
    dp_scale = 1.0
    if dp_scale_ptr is not None:
        dp_scale = tl.load(dp_scale_ptr)

    first, last = 0, Q
    if right is not None:
        first = tl.maximum(first_column - shift - right, 0)
    if left is not None:
        last = tl.minimum(Q, tl.maximum(first_column + BLOCK_K + left - shift, 0))
    dk, dv = tl.zeros((BLOCK_K, BLOCK_D), tl.float32), tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    first_block = first // BLOCK_Q
    blocks = tl.maximum(tl.cdiv(last, BLOCK_Q) - first_block, 0)
    group = H // HK
    for i in range(0, group * blocks):
        head = kv_head * group + i // blocks
        rows = (first_block + i % blocks) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        here = rows < Q
        base = (batch * Q * H + head) * D
        by_rows = rows[None, :] * (H * D) + d[:, None]
        q = tl.load(q_ptr + base + by_rows, mask=here[None, :] & (d < D)[:, None], other=0.0)
        do = tl.load(do_ptr + base + by_rows, mask=here[None, :] & (d < D)[:, None], other=0.0)
        lse = tl.load(lse_ptr + (batch * H + head) * Q + rows, mask=here, other=float("inf"))
        sums = tl.load(sums_ptr + (batch * H + head) * Q + rows, mask=here, other=0.0)
        logits = tl.dot(k, q) * logit_scale
        seen = tl.trans(seen_keys(rows, columns, Q, K, left, right, q_segments_ptr, k_segments_ptr, batch))
        s = tl.exp2(tl.where(seen, logits, float("-inf")) - lse[None, :])
        inside_t = here[:, None] & (d < D)[None, :]
        do_base = dot_ptr + (head * D).to(tl.int64) * dot_stride + batch * Q
        do_t = tl.load(do_base + d[None, :] * dot_stride + rows[:, None], mask=inside_t, other=0.0)
        dv += tl.dot((s * P_SCALE).to(k_ptr.dtype.element_ty), do_t)
        dp = s * (tl.dot(v, do) * ds_scale - sums[None, :])
        if dp_scale_ptr is None:
            dk += tl.dot(dp.to(tl.bfloat16), tl.trans(q).to(tl.bfloat16))
        else:
            q_base = qt_ptr + (head * D).to(tl.int64) * qt_stride + batch * Q
            q_t = tl.load(q_base + d[None, :] * qt_stride + rows[:, None], mask=inside_t, other=0.0)
            dk += tl.dot((dp * dp_scale).to(do_ptr.dtype.element_ty), q_t)

    inverse = tl.where(is_inf(tl.load(amax_ptr)), float("nan"), reciprocal(dp_scale))
    dk = dk * (inverse * q_scale * scale_log2 * LN_2)
    dv = dv * (do_scale / P_SCALE)
    base = (batch * K * HK + kv_head) * D
    tl.store(dk_ptr + base + offsets, dk.to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + base + offsets, dv.to(dv_ptr.dtype.element_ty), mask=inside)
