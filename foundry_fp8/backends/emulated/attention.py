"""FP8 attention emulated on any device, in blocks, equal bit for bit to the unfused definition (:mod:`.attention_reference`).

Queries are taken in blocks of rows, each with all the keys it can see. The forward keeps Q, K and V, in FP8; the backward
computes each block of probabilities again. No tensor of queries x keys outlives its block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_fp8.backends.emulated.attention_reference import (
    fp8_gemm,
    keep_mask,
    softmax_backward,
    softmax_rows,
)
from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.attention import (
    GRADIENTS,
    SLOTS,
    AttentionBackend,
    AttentionRecipe,
    FP8DotProductAttention,
    attention_format,
    attention_slots,
)
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.numerics.quantize import Quantized, amax_of, quantize_tensor, scale_from_amax
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling, Recipe

__all__ = ["EmulatedAttention"]

BLOCK_ELEMENTS = 2**21
"""Probabilities (over batch and heads) that a block of rows holds at most; a row is never split."""


class EmulatedAttention(AttentionBackend):
    """The definition, blockwise, on any device."""

    name: ClassVar[str] = "emulated"

    def recipe_reason(self, recipe: Recipe) -> str | None:
        """Delayed and current scaling have an attention form."""
        if isinstance(recipe, DelayedScaling | CurrentScaling):
            return None
        return f"the {recipe.name} recipe has no FP8 attention (Transformer Engine has none either)"

    def attend(
        self,
        module: FP8DotProductAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        softmax_scale: float,
        dropout_p: float,
    ) -> Tensor:
        """See :meth:`AttentionBackend.attend`."""
        assert module.recipe is not None
        call = _Call(
            quantize=_quantizer(module, module.recipe),
            mask=mask,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
            # Drawn from torch's generator, so that activation checkpointing restores it for the recompute.
            seed=torch.randint(2**62, ()).to(q.device) if dropout_p else None,
            rounds_outputs=isinstance(module.recipe, DelayedScaling),
        )
        return _Attention.apply(q, k, v, call)


def _quantizer(module: FP8DotProductAttention, recipe: AttentionRecipe) -> Callable[..., Quantized]:
    power_2 = isinstance(recipe, CurrentScaling) and recipe.power_2_scales
    delayed = attention_slots(recipe)
    # S and O are quantised in the forward and S again in the backward: with the scale that the forward saw.
    scales = {slot: module.slots[slot].scale.clone() for slot in delayed if slot not in GRADIENTS}
    recording = module.training

    def quantize(name: str, x: Tensor, *, again: bool = False) -> Quantized:
        slot, amax = SLOTS[name], amax_of(x)
        if slot not in delayed:
            scale = scale_from_amax(amax, attention_format(recipe, slot), power_2=power_2)
        else:
            scale = scales[slot] if slot in scales else module.slots[slot].scale
            # A recompute records no forward tensor: its input may have been packed since the first forward.
            if recording and not again and (slot in GRADIENTS or not inside_backward()):
                module.slots[slot].record(amax)
        found = quantize_tensor(x, scale, attention_format(recipe, slot), amax)
        if module.probe is not None and not again:
            module.probe(name, x, found)
        return found

    return quantize


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """What one forward and its backward share besides tensors with gradients."""

    quantize: Callable[..., Quantized]
    mask: AttentionMask
    softmax_scale: float
    dropout_p: float
    seed: Tensor | None
    rounds_outputs: bool

    def round_output(self, name: str, x: Tensor) -> Tensor:
        """Through FP8 and back where the recipe's kernel writes FP8."""
        return self.quantize(name, x).dequantize() if self.rounds_outputs else x


@dataclasses.dataclass(frozen=True)
class _Block:
    """Queries ``start:stop`` and the keys ``first:last`` that they can see, batch and heads first."""

    start: int
    stop: int
    first: int
    last: int
    s: Tensor
    """The softmax, float32 [b, heads, rows, keys]."""
    kept: Tensor | None
    """Dropout's factor, float32, the same shape."""

    @property
    def dropped(self) -> Tensor:
        return self.s if self.kept is None else self.s * self.kept


def _blocks(call: _Call, q: Quantized, k: Quantized) -> Iterator[_Block]:
    """The probabilities, block by block."""
    b, h, queries, d = q.data.shape
    hk, keys = k.data.shape[1:3]
    alpha = q.gemm_scale * k.gemm_scale * call.softmax_scale
    rows = max(1, min(queries, BLOCK_ELEMENTS // max(1, b * h * keys)))
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        first, last = call.mask.keys_seen(start, stop, queries, keys)
        grouped = q.data[:, :, start:stop].reshape(b, hk, -1, d)
        logits = fp8_gemm(grouped, k.data[:, :, first:last].transpose(2, 3)).float() * alpha
        logits = logits.view(b, h, stop - start, last - first)
        seen, bias = call.mask.block(start, stop, first, last, queries, keys, q.data.device)
        if bias is not None:
            logits = logits + bias.float()
        if seen is not None:
            logits = logits.masked_fill(~seen, -torch.inf)
        s = softmax_rows(logits)
        kept = None
        if call.seed is not None:
            keep = keep_mask(call.seed, b * h, start, stop, first, last, call.dropout_p)
            kept = keep.view(s.shape) / (1.0 - call.dropout_p)
        yield _Block(start, stop, first, last, s, kept)


def _keep_nan(seen: Tensor, scale: Tensor) -> Tensor:
    """``scale``, which is the same for every block, unless an earlier block held an Inf (its scale was NaN)."""
    return torch.where(torch.isnan(seen), seen, scale)


class _Attention(torch.autograd.Function):
    """Forward and backward over blocks of rows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        q8, k8, v8 = call.quantize("q", q), call.quantize("k", k), call.quantize("v", v)
        b, h, queries, _ = q.shape
        hk = k.shape[1]
        o = torch.empty(b, h, queries, v.shape[-1], dtype=torch.float32, device=q.device)
        for block in _blocks(call, q8, k8):
            s8 = call.quantize("s", block.dropped)
            values = v8.data[:, :, block.first : block.last]
            part = fp8_gemm(s8.data.view(b, hk, -1, block.last - block.first), values).float()
            scale = s8.gemm_scale * v8.gemm_scale
            o[:, :, block.start : block.stop] = part.view(b, h, -1, v.shape[-1]) * scale
        ctx.save_for_backward(*(t for x in (q8, k8, v8) for t in (x.data, x.scale_inv, x.amax)))
        ctx.formats = (q8.fmt, k8.fmt, v8.fmt)
        ctx.call = call
        ctx.dtypes = (q.dtype, k.dtype, v.dtype)
        return call.round_output("o", o).to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        call: _Call = ctx.call
        saved = ctx.saved_tensors
        q8, k8, v8 = (
            Quantized(saved[3 * i], saved[3 * i + 1], None, fmt, saved[3 * i + 2])
            for i, fmt in enumerate(ctx.formats)
        )
        b, h, queries, d = q8.data.shape
        hk, keys = k8.data.shape[1:3]
        do8 = call.quantize("do", do)
        dq = torch.empty(b, h, queries, d, dtype=torch.float32, device=do.device)
        dk = torch.zeros(b, hk, keys, d, dtype=torch.float64, device=do.device)
        dv = torch.zeros(b, hk, keys, do.shape[-1], dtype=torch.float64, device=do.device)
        dk_scale = dv_scale = torch.ones((), device=do.device)
        for block in _blocks(call, q8, k8):
            columns = slice(block.first, block.last)
            width = block.last - block.first
            s8 = call.quantize("s", block.dropped, again=True)
            grouped_do = do8.data[:, :, block.start : block.stop].reshape(b, hk, -1, do.shape[-1])
            dv[:, :, columns] += fp8_gemm(s8.data.view(b, hk, -1, width).transpose(2, 3), grouped_do)
            dv_scale = _keep_nan(dv_scale, s8.gemm_scale * do8.gemm_scale)
            ds = fp8_gemm(grouped_do, v8.data[:, :, columns].transpose(2, 3)).float()
            ds = (ds * (do8.gemm_scale * v8.gemm_scale)).view(block.s.shape)
            if block.kept is not None:
                ds = ds * block.kept
            dp8 = call.quantize("dp", softmax_backward(block.s, ds))
            grouped_dp = dp8.data.view(b, hk, -1, width)
            part = fp8_gemm(grouped_dp, k8.data[:, :, columns]).float()
            dq[:, :, block.start : block.stop] = part.view(b, h, -1, d) * (
                dp8.gemm_scale * k8.gemm_scale * call.softmax_scale
            )
            grouped_q = q8.data[:, :, block.start : block.stop].reshape(b, hk, -1, d)
            dk[:, :, columns] += fp8_gemm(grouped_dp.transpose(2, 3), grouped_q)
            dk_scale = _keep_nan(dk_scale, dp8.gemm_scale * q8.gemm_scale * call.softmax_scale)
        gradients = (("dq", dq), ("dk", dk.float() * dk_scale), ("dv", dv.float() * dv_scale))
        dq, dk, dv = (
            call.round_output(name, gradient).to(dtype)
            for (name, gradient), dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return dq, dk, dv, None
