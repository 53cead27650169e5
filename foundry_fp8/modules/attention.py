"""FP8 dot-product attention: through Transformer Engine, or emulated on any device.

The emulation is blockwise and equal bit for bit to the unfused definition (:mod:`.attention_reference`).
Queries are taken in blocks of rows, each with all the keys it can see. The forward keeps Q, K and V, in FP8; the backward
computes each block of probabilities again. No tensor of queries x keys outlives its block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.delayed_scaling import DelayedSlot
from foundry_fp8.formats import E4M3, Float8Format
from foundry_fp8.ledger import GemmLedger
from foundry_fp8.modules.attention_mask import AttentionMask
from foundry_fp8.modules.attention_reference import (
    fp8_gemm,
    keep_mask,
    softmax_backward,
    softmax_rows,
)
from foundry_fp8.quantize import Quantized, amax_of, quantize_tensor, scale_from_amax
from foundry_fp8.recipes import CurrentScaling, DelayedScaling

__all__ = ["SLOTS", "AttentionProbe", "AttentionRecipe", "FP8DotProductAttention", "attention_slots"]

AttentionRecipe = DelayedScaling | CurrentScaling
AttentionProbe = Callable[[str, Tensor, Quantized], None]
"""Called with each tensor that is quantised: its name (``q``, ..., ``dv``), the hp tensor (or the block of it), the result."""

SLOTS = {
    "q": "qkv",
    "k": "qkv",
    "v": "qkv",
    "s": "s",
    "o": "o",
    "do": "do",
    "dp": "dp",
    "dq": "dqkv",
    "dk": "dqkv",
    "dv": "dqkv",
}
"""The delayed-scaling slot of each tensor. Q, K and V share one scale, as in TE (one ``QKV_quantizer``)."""

GRADIENTS = ("do", "dp", "dqkv")
BLOCK_ELEMENTS = 2**21
"""Probabilities (over batch and heads) that a block of rows holds at most; a row is never split."""


def attention_slots(recipe: AttentionRecipe) -> tuple[str, ...]:
    """The slots that need delayed-scaling state: all of them, or S and dP alone under current scaling, as in TE."""
    return ("qkv", "s", "o", "do", "dp", "dqkv") if isinstance(recipe, DelayedScaling) else ("s", "dp")


def attention_format(recipe: AttentionRecipe, slot: str) -> Float8Format:
    """The number format of one slot: E4M3; that of gradients for dO, dP and dQKV."""
    return recipe.format("dy") if slot in GRADIENTS else E4M3


class FP8DotProductAttention(nn.Module):
    """Dot-product attention whose GEMMs, forward and backward, take FP8 operands. It has no parameters.

    Attributes:
        fqn: The name of the attention module that it serves.
        backend: Who runs it.
        recipe: What runs now; ``None`` is high precision, which the caller runs itself. See :meth:`set_recipe`.
        configured_recipe: What the conversion asked for.
        evaluate: What a forward in ``eval()`` mode runs in.
        slots: The delayed-scaling state by slot (:func:`attention_slots`).
        ledger: The GEMMs that ran. Both GEMMs of the forward count as fprop, the four of the backward as dgrad.
        probe: Called with every tensor quantised while it is set; for monitors.
    """

    def __init__(
        self,
        *,
        fqn: str,
        recipe: AttentionRecipe,
        backend: Literal["emulated", "transformer_engine"] = "emulated",
        evaluate: Literal["fp8", "high_precision"] = "high_precision",
    ) -> None:
        super().__init__()
        self.fqn = fqn
        self.backend = backend
        self.recipe: AttentionRecipe | None = recipe
        self.configured_recipe = recipe
        self.evaluate = evaluate
        self.slots: Mapping[str, DelayedSlot] = {}
        self.ledger = GemmLedger()
        self.probe: AttentionProbe | None = None

    def set_recipe(self, recipe: AttentionRecipe | None) -> None:
        """Run ``recipe`` from the next forward on; ``None`` runs high precision.

        Raises:
            RuntimeError: Neither ``None``, nor current scaling, nor the recipe of the conversion.
        """
        emulated_current = isinstance(recipe, CurrentScaling) and self.backend == "emulated"
        if recipe is not None and recipe != self.configured_recipe and not emulated_current:
            raise RuntimeError(
                f"{self.fqn}: {recipe.name} is not what this attention was converted with "
                f"({self.configured_recipe.name}). Demote to high precision (on the emulated backend, also to current)."
            )
        self.recipe = recipe

    @property
    def runs_fp8(self) -> bool:
        """Whether a forward in the present mode runs in FP8."""
        return self.recipe is not None and (self.training or self.evaluate == "fp8")

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        softmax_scale: float,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attention in FP8, differentiable in q, k and v.

        Args:
            q: [b, heads, q, d], hp.
            k: [b, kv_heads, k, d], hp; ``kv_heads`` divides ``heads``.
            v: [b, kv_heads, k, d], hp.
            mask: What each query sees. A query that sees nothing gets zeros.
            softmax_scale: Multiplies the logits.
            dropout_p: Probability of dropping a probability; the caller passes 0 in evaluation.

        Returns:
            [b, heads, q, d], the dtype of ``q``.
        """
        if mask.bias is not None and mask.bias.requires_grad:
            raise RuntimeError(f"{self.fqn}: FP8 attention has no gradient for a trainable attention bias.")
        # Counted before it runs: a recompute stops inside it, once it has what the backward needs.
        self._record_forward(q, k)
        attend = self._emulated if self.backend == "emulated" else self._transformer_engine
        out = attend(q, k, v, mask, softmax_scale, dropout_p)
        self._record_backward(q, k, out)
        return out

    def _transformer_engine(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax_scale: float, dropout_p: float
    ) -> Tensor:
        from foundry_fp8.backends.transformer_engine.attention import te_attention

        return te_attention(self, q, k, v, mask=mask, softmax_scale=softmax_scale, dropout_p=dropout_p)

    def _emulated(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax_scale: float, dropout_p: float
    ) -> Tensor:
        assert self.recipe is not None
        call = _Call(
            quantize=self._quantizer(self.recipe),
            mask=mask,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
            # Drawn from torch's generator, so that activation checkpointing restores it for the recompute.
            seed=torch.randint(2**62, ()).to(q.device) if dropout_p else None,
            rounds_outputs=isinstance(self.recipe, DelayedScaling),
        )
        return _Attention.apply(q, k, v, call)

    def _quantizer(self, recipe: AttentionRecipe) -> Callable[..., Quantized]:
        power_2 = isinstance(recipe, CurrentScaling) and recipe.power_2_scales
        delayed = attention_slots(recipe)
        # S and O are quantised in the forward and S again in the backward: with the scale that the forward saw.
        scales = {slot: self.slots[slot].scale.clone() for slot in delayed if slot not in GRADIENTS}
        recording = self.training

        def quantize(name: str, x: Tensor, *, again: bool = False) -> Quantized:
            slot, amax = SLOTS[name], amax_of(x)
            if slot not in delayed:
                scale = scale_from_amax(amax, attention_format(recipe, slot), power_2=power_2)
            else:
                scale = scales[slot] if slot in scales else self.slots[slot].scale
                # A recompute records no forward tensor: its input may have been packed since the first forward.
                if recording and not again and (slot in GRADIENTS or not inside_backward()):
                    self.slots[slot].record(amax)
            found = quantize_tensor(x, scale, attention_format(recipe, slot), amax)
            if self.probe is not None and not again:
                self.probe(name, x, found)
            return found

        return quantize

    def _record_forward(self, q: Tensor, k: Tensor) -> None:
        rows, keys, d = q.shape[0] * q.shape[1] * q.shape[2], k.shape[2], q.shape[3]
        recompute = inside_backward()
        for n, inner in ((keys, d), (d, keys)):  # P, O
            self.ledger.record("fprop", rows, n, inner, "fp8", recompute=recompute)

    def _record_backward(self, q: Tensor, k: Tensor, out: Tensor) -> None:
        if not out.requires_grad:
            return
        rows, keys, d = q.shape[0] * q.shape[1] * q.shape[2], k.shape[2], q.shape[3]

        def record(_: Tensor) -> None:
            for n, inner in ((keys, d), (d, keys), (d, keys), (d, keys)):  # dS, dQ, dK, dV
                self.ledger.record("dgrad", rows, n, inner, "fp8")

        out.register_hook(record)

    def extra_repr(self) -> str:
        """What it runs."""
        return f"recipe={'high_precision' if self.recipe is None else self.recipe.name}"


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
