"""FP8 attention emulated on any device, in blocks.

========== ============================================ ===========================
step       equation                                     operands of the GEMM
========== ============================================ ===========================
logits     ``P = softmax_scale * Q K^T`` (+ bias, mask) Q, K in E4M3
softmax    ``S = exp(P - m) / l``, row by row, float32
dropout    ``S' = S * keep / (1 - p)``
output     ``O = S' V``                                 S', V in E4M3
dV         ``dV = S'^T dO``                             S' in E4M3, dO in E5M2
dS'        ``dS' = dO V^T``                             dO in E5M2, V in E4M3
softmax    ``dP = S * (dS - rowsum(S * dS))``
dQ         ``dQ = softmax_scale * dP K``                dP in E5M2, K in E4M3
dK         ``dK = softmax_scale * dP^T Q``              dP in E5M2, Q in E4M3
========== ============================================ ===========================

With delayed scaling O leaves through E4M3 and dQ, dK, dV through E5M2, because TE's kernel writes them in FP8. S is
quantised after dropout; the softmax's own gradient uses the unquantised S. This is what TE's emulation
(``UnfusedDotProductAttention`` with ``NVTE_UnfusedDPA_Emulate_FP8=1``) does; what cuDNN's kernel does inside is not
documented to that detail.

Queries are processed in blocks of rows, head by head, each with all the keys it can see. The forward keeps Q, K and V in FP8;
the backward recomputes each block of probabilities bit for bit. No queries x keys tensor outlives its block, so memory grows
linearly with the sequence length.

Products of FP8 values are exact in float32 (and on bfloat16 units, which represent the values exactly); sums are in float32.
The tests' unfused definition adds in float64. So results differ from it by float32's rounding of the sums, and by one FP8 step
where that makes a probability round to the neighbouring FP8 value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_fp8.backends.emulated.dense import round_values_
from foundry_fp8.compat.fake_tensor import FakeTensor
from foundry_fp8.layers.attention import (
    SLOTS,
    AttentionBackend,
    AttentionInputs,
    AttentionRecipe,
    FP8DotProductAttention,
    GradScores,
    attention_format,
    attention_slots,
    by_tokens,
    no_attention_form,
)
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.backend import Availability
from foundry_fp8.numerics.quantize import Quantized, amax_of, quantize_tensor, scale_from_amax
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["EmulatedAttention", "keep_mask"]

BLOCK_ELEMENTS = 2**18
"""Most probabilities in a block (1 MiB of float32, which stays in the cache); a row is never split."""


class EmulatedAttention(AttentionBackend):
    """FP8 attention in blocks of queries, on any device."""

    name: ClassVar[str] = "emulated"

    def recipe_reason(self, recipe: Recipe, grad_scores: GradScores = "fp8") -> str | None:
        """Delayed and current scaling have an attention form."""
        return no_attention_form(recipe)

    def call_reason(self, module: FP8DotProductAttention, given: AttentionInputs) -> Availability:
        """Every call is supported."""
        return Availability(True)

    @torch.compiler.disable
    def attend(self, module: FP8DotProductAttention, given: AttentionInputs) -> Tensor:
        """See :meth:`AttentionBackend.attend`."""
        assert module.recipe is not None
        q, k, v, mask, softmax_scale, dropout_p = given
        call = _Call(
            module=module,
            recipe=module.recipe,
            mask=mask,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
            # Drawn from torch's generator, so that activation checkpointing restores it for the recompute.
            seed=torch.randint(2**62, (), device="cpu").to(q.device) if dropout_p else None,
            scales={slot: module.slots[slot].scale for slot in attention_slots(module.recipe)},
            amaxes=module.amaxes(),
        )
        out: Tensor = _Attention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
        return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """What one forward and its backward share besides q, k and v."""

    module: FP8DotProductAttention
    recipe: AttentionRecipe
    mask: AttentionMask
    softmax_scale: float
    dropout_p: float
    seed: Tensor | None
    scales: dict[str, Tensor]
    amaxes: dict[str, Tensor]

    def quantize(self, name: str, x: Tensor) -> Quantized:
        """Quantise a whole tensor (not S or dP); ``name`` is a key of :data:`SLOTS`."""
        slot, amax = SLOTS[name], amax_of(x)
        fmt = attention_format(self.recipe, slot)
        if slot in attention_slots(self.recipe):
            scale = self.scales[slot]
            self.record(slot, amax)
        else:
            power_2 = self.recipe.powers_of_two
            scale = scale_from_amax(amax, fmt, power_2=power_2)
        found = quantize_tensor(x, scale, fmt, amax)
        if self.module.probe is not None:
            self.module.probe(name, by_tokens(x), dataclasses.replace(found, data=by_tokens(found.data)))
        return found

    def record(self, slot: str, amax: Tensor) -> None:
        """Raise the slot's amax of the current pass to ``amax``, in place."""
        if slot in self.amaxes:
            torch.fmax(self.amaxes[slot], amax, out=self.amaxes[slot])

    def output(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` in ``dtype``; under delayed scaling rounded to FP8 first, as its hardware kernel writes FP8."""
        rounds = self.recipe.uses_history
        return (self.quantize(name, x).dequantize() if rounds else x).to(dtype)


class _BlockOperand:
    """S or dP, which is quantised block by block with a scale known beforehand.

    Args:
        call: The call.
        name: ``s`` or ``dp``.
        probed: Whether the module's probe gets it.
        high_precision: Round to bfloat16 instead, unscaled. The amax is still recorded, for a later change to FP8.
    """

    def __init__(self, call: _Call, name: str, *, probed: bool = True, high_precision: bool = False) -> None:
        self._call = call
        self._high_precision = high_precision
        self._name = name
        self._fmt = attention_format(call.recipe, SLOTS[name])
        self._scale = call.scales[SLOTS[name]]
        self._amax = torch.zeros_like(self._scale)
        self._probe = call.module.probe if probed and not high_precision else None

    def quantize(self, x: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        """The FP8 values of the block ``x``, unscaled, in ``out`` (float32, the same shape; may be ``x``)."""
        amax = _block_amax(x)
        self._amax = torch.maximum(self._amax, amax)
        if self._high_precision:
            return out.copy_(x.bfloat16())
        if self._probe is not None:
            self._probe(self._name, x, quantize_tensor(x, self._scale, self._fmt, amax))
        return round_values_(torch.mul(x, self._scale, out=out), self._fmt, scratch)

    @property
    def gemm_scale(self) -> Tensor:
        """The factor (0-d) that undoes the scale after a GEMM; NaN if any block so far held an Inf."""
        if self._high_precision:
            return torch.ones_like(self._scale)
        return torch.where(torch.isinf(self._amax), torch.nan, self._scale.reciprocal())

    def record(self) -> None:
        """Record the amax; call it after the last block."""
        self._call.record(SLOTS[self._name], self._amax)


def _block_amax(x: Tensor) -> Tensor:
    """:func:`amax_of`; on a CPU, where reading a value needs no synchronisation, in one pass if there is no NaN."""
    if x.device.type != "cpu" or isinstance(x, FakeTensor):
        return amax_of(x)
    least, most = x.aminmax()
    amax = torch.maximum(-least, most)
    return amax_of(x) if math.isnan(amax.item()) else amax


@dataclasses.dataclass(frozen=True)
class _Block:
    """The softmax of queries ``rows`` of one batch entry and the heads that share a key head, over the ``keys`` they see."""

    batch: int
    head: int
    """The key head."""
    group: int
    """The heads that share it."""
    rows: slice
    keys: slice

    def of_queries(self, x: Tensor) -> Tensor:
        """This block's part of ``x`` [b, kv_heads, group, q, d]: [group * rows, d]."""
        return x[self.batch, self.head, :, self.rows].reshape(-1, x.shape[-1])

    def write_queries(self, out: Tensor, x: Tensor) -> None:
        """``x`` [group * rows, d] to its place in ``out`` [b, kv_heads, group, q, d]."""
        part = out[self.batch, self.head, :, self.rows]
        part.copy_(x.view(part.shape))

    def of_keys(self, x: Tensor) -> Tensor:
        """This block's part of ``x`` [b, kv_heads, k, d], a view: [keys, d]."""
        return x[self.batch, self.head, self.keys]

    def of_mask(self, x: Tensor) -> Tensor:
        """This block's part of ``x``, which broadcasts to [b, heads, rows, keys]; it broadcasts to [group, rows, keys]."""
        x = x.expand((1,) * (4 - x.dim()) + x.shape)
        x = x[self.batch if x.shape[0] > 1 else 0]
        return x if x.shape[0] == 1 else x[self.head * self.group : (self.head + 1) * self.group]


class _Softmax:
    """Computes the probabilities block by block, in memory that the blocks share.

    Args:
        call: The call.
        q: FP8 values of Q, float32 [b, kv_heads, group, q, d].
        k: Of K, [b, kv_heads, k, d].
        logit_scale: 0-d; logits are this times the products of the FP8 values of Q and K.
    """

    def __init__(self, call: _Call, q: Tensor, k: Tensor, logit_scale: Tensor) -> None:
        self._call, self._q, self._k = call, q, k
        # exp is taken as a power of two, which torch computes several times faster on a CPU.
        self._scale = logit_scale * math.log2(math.e)
        self._queries, self._keys = q.shape[3], k.shape[2]
        self._rows = max(1, min(self._queries, BLOCK_ELEMENTS // max(1, q.shape[2] * self._keys)))
        size = self._rows * q.shape[2] * self._keys
        self._memory = [torch.empty(size, dtype=torch.float32, device=q.device) for _ in range(2)]
        self._scratch = torch.empty(size, dtype=torch.int32, device=q.device)

    def blocks(self) -> Iterator[tuple[_Block, Tensor, Tensor | None]]:
        """Each block with S, float32 [group * rows, keys] (overwritten by the next), and dropout's factor of the same shape."""
        b, hk, group = self._q.shape[:3]
        mask, device = self._call.mask, self._q.device
        starts = range(0, self._queries, self._rows)
        if isinstance(
            self._q, FakeTensor
        ):  # memory planning: the last block allocates as much as any, and there are no values
            b, hk, starts = 1, 1, starts[-1:]
        for start in starts:
            stop = min(start + self._rows, self._queries)
            first, last = mask.keys_seen(start, stop, self._queries, self._keys)
            # A causal mask hides nothing to the left of the first query's own key.
            edge = first
            if mask.only_causal:
                edge = max(first, min(last, start + self._keys - self._queries))
            seen, bias = mask.block(start, stop, edge, last, self._queries, self._keys, device)
            hidden = None if seen is None else ~seen
            for batch in range(b):
                for head in range(hk):
                    block = _Block(batch, head, group, slice(start, stop), slice(first, last))
                    yield block, self._softmax(block, hidden, edge - first, bias), self._kept(block)

    def other(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Two more buffers of the shape of ``s``: float32, and int32."""
        return self._memory[1][: s.numel()].view(s.shape), self._scratch[: s.numel()].view(s.shape)

    def _softmax(self, block: _Block, hidden: Tensor | None, edge: int, bias: Tensor | None) -> Tensor:
        queries, keys = block.of_queries(self._q), block.of_keys(self._k)
        s = self._memory[0][: len(queries) * len(keys)].view(len(queries), len(keys))
        torch.mm(queries, keys.t(), out=s).mul_(self._scale)
        by_head = s.view(block.group, -1, len(keys))
        if bias is not None:
            by_head.add_(block.of_mask(bias).float(), alpha=math.log2(math.e))
        if hidden is not None:
            by_head[..., edge:].masked_fill_(block.of_mask(hidden), -torch.inf)
        most = s.amax(-1, keepdim=True)
        s.sub_(torch.where(most == -torch.inf, 0.0, most)).exp2_()
        total = s.sum(-1, keepdim=True)
        return s.mul_(torch.where(total == 0, 1.0, total).reciprocal_())

    def _kept(self, block: _Block) -> Tensor | None:
        call, (_, hk, group) = self._call, self._q.shape[:3]
        if call.seed is None:
            return None
        head = (block.batch * hk + block.head) * group
        rows, keys = block.rows, block.keys
        keep = keep_mask(call.seed, head, group, rows.start, rows.stop, keys.start, keys.stop, call.dropout_p)
        return keep.flatten(0, 1) / (1.0 - call.dropout_p)


def keep_mask(
    seed: Tensor, head: int, heads: int, start: int, stop: int, first: int, last: int, p: float
) -> Tensor:
    """Which probabilities dropout keeps: a hash of the seed and the place, the same in any blocking and in backward.

    Args:
        seed: 0-d int64.
        head: First head, counted through the batch.
        heads: How many.
        start: First query.
        stop: One past the last query.
        first: First key.
        last: One past the last key.
        p: Probability of dropping.

    Returns:
        bool ``[heads, stop - start, last - first]``.
    """
    device = seed.device
    place = torch.arange(head, head + heads, device=device)[:, None, None]
    query = torch.arange(start, stop, device=device)[None, :, None]
    key = torch.arange(first, last, device=device)[None, None, :]
    # The finaliser of SplitMix64 (Steele et al. 2014) on a distinct counter for each place; int64 wraps as it should.
    x = seed + ((place << 42) ^ (query << 21) ^ key) * -7046029254386353131
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).double() * 2.0**-53 >= p


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class _Attention(torch.autograd.Function):
    """Forward and backward over blocks of rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            q8, k8, v8 = call.quantize("q", q), call.quantize("k", k), call.quantize("v", v)
            q_values, k_values, v_values = _values(q8, k8, v8)
            softmax = _Softmax(call, q_values, k_values, q8.gemm_scale * k8.gemm_scale * call.softmax_scale)
            s8 = _BlockOperand(call, "s")
            o = q_values.new_empty(*q_values.shape[:4], v.shape[-1])
            for block, s, kept in softmax.blocks():
                dropped = s if kept is None else s.mul_(kept)
                values = s8.quantize(dropped, s, softmax.other(s)[1])
                block.write_queries(o, values @ block.of_keys(v_values))
            s8.record()
            o = o.mul_(s8.gemm_scale * v8.gemm_scale).flatten(1, 2)
            ctx.save_for_backward(*(t for x in (q8, k8, v8) for t in (x.data, x.scale_inv, x.amax)))
            ctx.formats = (q8.fmt, k8.fmt, v8.fmt)
            ctx.call = call
            ctx.dtypes = (q.dtype, k.dtype, v.dtype)
            return call.output("o", o, q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        call: _Call = ctx.call
        saved = ctx.saved_tensors
        with torch.autocast(do.device.type, enabled=False):
            q8, k8, v8 = (
                Quantized(saved[3 * i], saved[3 * i + 1], None, fmt, saved[3 * i + 2])
                for i, fmt in enumerate(ctx.formats)
            )
            gradients = _backward(call, q8, k8, v8, call.quantize("do", do))
            dq, dk, dv = (
                call.output(name, gradient, dtype)
                for name, gradient, dtype in zip(("dq", "dk", "dv"), gradients, ctx.dtypes, strict=True)
            )
        return dq, dk, dv, None


def _backward(call: _Call, q8: Quantized, k8: Quantized, v8: Quantized, do8: Quantized) -> tuple[Tensor, ...]:
    """dQ, dK and dV, float32."""
    q, k, v = _values(q8, k8, v8)
    do = do8.data.float().unflatten(1, q.shape[1:3])
    softmax = _Softmax(call, q, k, q8.gemm_scale * k8.gemm_scale * call.softmax_scale)
    s8 = _BlockOperand(call, "s", probed=False)
    dp8 = _BlockOperand(call, "dp", high_precision=call.module.grad_scores == "bfloat16")
    ds_scale = do8.gemm_scale * v8.gemm_scale
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for block, s, kept in softmax.blocks():
        other, scratch = softmax.other(s)
        block_do = block.of_queries(do)
        dropped = s if kept is None else s * kept
        block.of_keys(dv).addmm_(s8.quantize(dropped, other, scratch).t(), block_do)
        ds = torch.mm(block_do, block.of_keys(v).t(), out=other).mul_(ds_scale)
        if kept is not None:
            ds.mul_(kept)
        product = torch.mul(s, ds, out=scratch.view(torch.float32))
        ds.sub_(product.sum(-1, keepdim=True)).mul_(s)
        dp = dp8.quantize(ds, ds, scratch)
        block.write_queries(dq, dp @ block.of_keys(k))
        block.of_keys(dk).addmm_(dp.t(), block.of_queries(q))
    dp8.record()
    dp_scale = dp8.gemm_scale * call.softmax_scale
    dq.mul_(dp_scale * k8.gemm_scale)
    dk.mul_(dp_scale * q8.gemm_scale)
    dv.mul_(s8.gemm_scale * do8.gemm_scale)
    return dq.flatten(1, 2), dk, dv


def _values(q8: Quantized, k8: Quantized, v8: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 values in float32: Q [b, kv_heads, group, q, d], K and V [b, kv_heads, k, d]."""
    q, k, v = (x.data.float() for x in (q8, k8, v8))
    return q.unflatten(1, (k.shape[1], -1)), k, v
