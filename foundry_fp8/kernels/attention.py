"""FP8 attention, forward: ``O = softmax(Q K^T) V`` with both products on FP8 tensor cores, and no matrix of queries x keys in memory.

One program takes a tile of queries of one head and walks over the keys that they see, a block at a time, with the running
softmax of FlashAttention (Dao et al., arXiv:2205.14135 and 2307.08691): of row i, after block j, walked in the order j = 0, 1, ...

    m_j = max(m_(j-1), max of the block's logits)        P_j = exp(logits - m_j), float32
    l_j = l_(j-1) exp(m_(j-1) - m_j) + sum(P_j)          O_j = O_(j-1) exp(m_(j-1) - m_j) + e4m3(2^8 P_j) V_j / 2^8

**The walk goes from the last key to the first**, that is, from the diagonal outwards. P is relative to the largest logit *so far*,
and E4M3 flushes what is below 2^-18 of it. The tokens that attract most of the softmax ("sinks") stand at the beginning: met last, they
flush nothing but their own block (arXiv:2606.06521, which also scales by 2^8). Each product starts from zero and is added up in float32 outside of the tensor
core, whose own FP8 accumulator keeps 14 bits.

Q, K and V are E4M3 with one scale a tensor. Both operands of an FP8 product have to be contiguous along what it contracts, keys here for V:
V comes transposed, as :func:`foundry_fp8.kernels.tensorwise.quantize_tensorwise` writes it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.launch import CONTRACTED
from foundry_fp8.kernels.scales import magnitude

__all__ = ["AttentionShape", "attention_forward", "attention_forward_reference"]

P_SCALE = tl.constexpr(256.0)
"""P is at most 1, and 448 is E4M3's largest: 2^8 is the largest power of two that P may be scaled by."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes, and what each query sees by position. Queries are the last ``queries`` of ``keys`` positions."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    softmax_scale: float
    left: int | None = None
    """Keys this far to the left of the query at most."""
    right: int | None = None
    """The same to the right: 0 for a causal model."""

    @property
    def block_d(self) -> int:
        """``head_dim`` as the tensor cores get it, zeros above."""
        return max(64, triton.next_power_of_2(self.head_dim))

    def launch(self) -> dict[str, Any]:
        """The arguments that all attention kernels take."""
        return {
            "Q": self.queries,
            "K": self.keys,
            "H": self.heads,
            "HK": self.kv_heads,
            "left": self.left,
            "right": self.right,
            "scale_log2": self.softmax_scale * math.log2(math.e),
            "D": self.head_dim,
            "BLOCK_D": self.block_d,
            **CONTRACTED,
        }


@dataclasses.dataclass(frozen=True)
class Tile:
    """Queries and keys a block, warps, and loads in flight."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    def launch(self) -> dict[str, int]:
        """As launch arguments."""
        return {
            "BLOCK_Q": self.queries,
            "BLOCK_K": self.keys,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


TILES = {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3)}
"""By ``block_d``."""


def attention_forward(
    shape: AttentionShape,
    q: Tensor,
    k: Tensor,
    v_t: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    *,
    out_dtype: torch.dtype,
    segments: tuple[Tensor, Tensor] | None = None,
    amax_s: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of quantised Q, K, V; :func:`attention_forward_reference` is the definition.

    Args:
        shape: Sizes and positions.
        q: E4M3 ``[>= batch * queries, heads * head_dim]``, contiguous.
        k: E4M3 ``[>= batch * keys, kv_heads * head_dim]``, contiguous.
        v_t: E4M3 ``[kv_heads * head_dim, >= batch * keys]``, contiguous: V transposed.
        scales: Of q, k and v, each one float32 element: what its values are multiplied with (NaN after an Inf).
        out_dtype: hp.
        segments: Of the queries, int32 ``[batch, queries]``, and of the keys, ``[batch, keys]``: a query sees keys of its own segment.
        amax_s: One float32 element, raised to the largest probability.

    Returns:
        The output ``[batch, queries, heads, head_dim]``, and float32 ``[batch, heads, queries]``: the logarithm to base 2 of the
        softmax's denominator, +Inf where a query sees nothing (its output is 0).
    """
    out = torch.empty(
        (shape.batch, shape.queries, shape.heads, shape.head_dim), dtype=out_dtype, device=q.device
    )
    lse = torch.empty((shape.batch, shape.heads, shape.queries), dtype=torch.float32, device=q.device)
    tile = TILES[shape.block_d]
    grid = (triton.cdiv(shape.queries, tile.queries), shape.batch * shape.heads)
    _forward_kernel[grid](
        q,
        k,
        v_t,
        *scales,
        *(segments or (None, None)),
        out,
        lse,
        amax_s,
        v_t.stride(0),
        **shape.launch(),
        **tile.launch(),
    )
    return out, lse


def attention_forward_reference(
    shape: AttentionShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    seen: Tensor,
    *,
    block: int,
) -> tuple[Tensor, Tensor]:
    """What :func:`attention_forward` computes, with every matrix in memory and float64 sums.

    Args:
        shape: Sizes.
        q: FP8 values ``[batch, heads, queries, head_dim]``.
        k: The same ``[batch, heads, keys, head_dim]``, each key head as often as queries share it.
        v: As ``k``.
        scales: Of q, k and v.
        seen: bool, broadcasts to ``[batch, heads, queries, keys]``.
        block: Keys a block, on which the running maximum depends.

    Returns:
        The output ``[batch, heads, queries, head_dim]`` and the logarithm, both float64.
    """
    q_scale, k_scale, v_scale = (scale.double() for scale in scales)
    logits = (q.double() @ k.double().transpose(2, 3)) * (
        q_scale * k_scale * shape.softmax_scale * math.log2(math.e)
    )
    logits = logits.masked_fill(~seen, -math.inf)
    most = torch.full_like(logits[..., :1], -math.inf)
    total, out = torch.zeros_like(most), torch.zeros_like(q, dtype=torch.float64)
    for first in reversed(range(0, shape.keys, block)):
        part = logits[..., first : first + block]
        new = torch.maximum(most, part.amax(-1, keepdim=True))
        safe = torch.where(new == -math.inf, 0.0, new)
        p, rescale = torch.exp2(part - safe), torch.exp2(most - safe)
        p8 = (p.float() * P_SCALE.value).to(torch.float8_e4m3fn).double() / P_SCALE.value
        total = total * rescale + p.sum(-1, keepdim=True)
        out = out * rescale + p8 @ v[..., first : first + block, :].double()
        most = new
    lse = torch.where(total == 0, math.inf, most + torch.log2(total))
    return out * v_scale / torch.where(total == 0, 1.0, total), lse.squeeze(-1)


@triton.jit
def seen_keys(rows, columns, Q, K, left, right, q_segments_ptr, k_segments_ptr, batch):
    """Bool ``[rows, columns]``: what of the keys at ``columns`` the queries at ``rows`` see."""
    positions = rows + K - Q
    seen = (columns < K)[None, :] & (rows < Q)[:, None]
    if right is not None:
        seen = seen & (columns[None, :] <= positions[:, None] + right)
    if left is not None:
        seen = seen & (columns[None, :] >= positions[:, None] - left)
    if q_segments_ptr is not None:
        of_rows = tl.load(q_segments_ptr + batch * Q + rows, mask=rows < Q, other=0)
        of_columns = tl.load(k_segments_ptr + batch * K + columns, mask=columns < K, other=0)
        seen = seen & (of_rows[:, None] == of_columns[None, :])
    return seen


@triton.jit
def _attend(
    most, total, out, q, first_column, rows, d, k_ptr, vt_ptr, vt_stride, logit_scale, q_segments_ptr, k_segments_ptr,
    batch, kv_head, Q, K, HK, left, right,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A block of keys, added to the running softmax ``(most, total, out)``. Not ``MASKED``: every query sees every key of it."""
    columns = first_column + tl.arange(0, BLOCK_K)
    k_ptrs = k_ptr + (batch * K * HK + kv_head) * D + (columns[None, :] * (HK * D) + d[:, None])
    v_base = vt_ptr + (kv_head * D).to(tl.int64) * vt_stride + batch * K
    v_ptrs = v_base + (d[None, :] * vt_stride + columns[:, None])
    if MASKED:
        here = columns < K
        k = tl.load(k_ptrs, mask=here[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=here[:, None] & (d < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)
    else:
        k = tl.load(k_ptrs, mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=(d < D)[None, :], other=0.0)
    logits = tl.dot(q, k) * logit_scale
    if MASKED:
        seen = seen_keys(rows, columns, Q, K, left, right, q_segments_ptr, k_segments_ptr, batch)
        logits = tl.where(seen, logits, float("-inf"))
    new = tl.maximum(most, tl.max(logits, axis=1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(logits - safe[:, None])
    rescale = tl.exp2(most - safe)
    total = total * rescale + tl.sum(p, axis=1)
    out = out * rescale[:, None] + tl.dot((p * P_SCALE).to(vt_ptr.dtype.element_ty), v)
    return new, total, out


@triton.jit
def _forward_kernel(
    q_ptr,
    k_ptr,
    vt_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_segments_ptr,
    k_segments_ptr,
    out_ptr,
    lse_ptr,
    amax_s_ptr,
    vt_stride,
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
    # The last tiles see most keys under a causal rule: begun first, they do not trail.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    batch, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    kv_head = head // (H // HK)
    shift = K - Q
    rows, d = first_row + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    inside = (rows < Q)[:, None] & (d < D)[None, :]
    # Bases in 64 bits, offsets within a sequence in 32: a tile of pointers costs registers.
    base, row_offsets = (batch * Q * H + head) * D, rows[:, None] * (H * D) + d[None, :]
    q = tl.load(q_ptr + base + row_offsets, mask=inside, other=0.0)
    logit_scale = tl.load(q_scale_ptr) * tl.load(k_scale_ptr) * scale_log2

    last, first = K, 0
    if right is not None:
        last = tl.minimum(K, tl.maximum(first_row + BLOCK_Q + shift + right, 0))
    if left is not None:
        first = tl.maximum(first_row + shift - left, 0)
    most = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    out = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    # Blocks of which every query of the tile sees every key need no mask: under a causal rule, all but those on the diagonal.
    blocks, first_block = tl.cdiv(last, BLOCK_K), first // BLOCK_K
    whole, whole_end = first_block, first_block
    if q_segments_ptr is None:
        whole_end = K // BLOCK_K
        if right is not None:
            whole_end = tl.minimum(whole_end, tl.maximum(first_row + shift + right + 1, 0) // BLOCK_K)
        whole_end = tl.minimum(tl.maximum(whole_end, first_block), tl.maximum(blocks, first_block))
        if left is not None:
            whole = tl.cdiv(tl.maximum(first_row + BLOCK_Q - 1 + shift - left, 0), BLOCK_K)
            whole = tl.minimum(tl.maximum(whole, first_block), whole_end)
    for i in range(0, blocks - whole_end):
        most, total, out = _attend(
            most, total, out, q, (blocks - 1 - i) * BLOCK_K, rows, d, k_ptr, vt_ptr, vt_stride, logit_scale, q_segments_ptr,
            k_segments_ptr, batch, kv_head, Q, K, HK, left, right, D, BLOCK_D, BLOCK_K, True,
        )  # fmt: skip
    if q_segments_ptr is None:
        for i in range(0, whole_end - whole):
            most, total, out = _attend(
                most, total, out, q, (whole_end - 1 - i) * BLOCK_K, rows, d, k_ptr, vt_ptr, vt_stride, logit_scale,
                q_segments_ptr, k_segments_ptr, batch, kv_head, Q, K, HK, left, right, D, BLOCK_D, BLOCK_K, False,
            )  # fmt: skip
        if left is not None:
            for i in range(0, whole - first_block):
                most, total, out = _attend(
                    most, total, out, q, (whole - 1 - i) * BLOCK_K, rows, d, k_ptr, vt_ptr, vt_stride, logit_scale,
                    q_segments_ptr, k_segments_ptr, batch, kv_head, Q, K, HK, left, right, D, BLOCK_D, BLOCK_K, True,
                )  # fmt: skip

    nothing = total == 0
    total = tl.where(nothing, 1.0, total)
    out = out * (tl.load(v_scale_ptr) / (P_SCALE * total))[:, None]
    lse = tl.where(nothing, float("inf"), most + tl.log2(total))
    tl.store(lse_ptr + (batch * H + head) * Q + rows, lse, mask=rows < Q)
    tl.store(out_ptr + base + row_offsets, out.to(out_ptr.dtype.element_ty), mask=inside)
    if amax_s_ptr is not None:  # the probability of the largest logit is 1 / total
        largest = tl.where(nothing | (rows >= Q), 0.0, 1.0 / total)
        tl.atomic_max(amax_s_ptr, tl.max(magnitude(largest), axis=0), sem="relaxed")
