"""FP8 attention through the kernels of this package (:mod:`foundry_fp8.kernels.attention`), forward and backward.

What differs from the definition that the emulation follows (:mod:`foundry_fp8.backends.emulated.attention_reference`), because a fused kernel
never sees a whole row of probabilities:

* P is quantised before it is divided by its sum, with the constant scale 2^8 and relative to the largest logit so far; S has a
  delayed scale there. In the backward S is quantised with 2^8 too.
* O, dQ, dK and dV leave in the model's dtype: no kernel behind them wants FP8 of this one.
* ``rowsum(S dS)`` is taken as ``rowsum(dO O)``, which is the same for the O of unrounded probabilities.

The delayed-scaling state is the same one all the same, S's amax included, so that a run can go on with another backend. O, dQ, dK and dV have
no amaxes here (a reduction of the accumulators to one number stops Triton 3.6 from compiling for sm_100): their scales stay as they were.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_fp8.backends.native.plan import plan_of, quantized_view
from foundry_fp8.compat.dynamo_names import renamed_for_dynamo
from foundry_fp8.kernels.launch import HP_DTYPES
from foundry_fp8.layers.attention import (
    SLOTS,
    AttentionBackend,
    AttentionProbe,
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
from foundry_fp8.numerics.recipes import Operand, Recipe

__all__ = ["NativeAttention", "native_attention_requirement"]

LARGEST_HEAD = 128
HEAD_MULTIPLE = 16
HIDDEN = -(2**31)
"""The segment of a key that is padding: no document has this number (LLM Foundry's padding has document -1)."""


class NativeAttention(AttentionBackend):
    """FP8 attention on CUDA with torch and Triton alone; on a CPU under Triton's interpreter, for tests."""

    name: ClassVar[str] = "native"

    def recipe_reason(self, recipe: Recipe, grad_scores: GradScores = "fp8") -> str | None:
        """Delayed and current scaling have an attention form."""
        return no_attention_form(recipe)

    def module_reason(self, recipe: AttentionRecipe, head_dim: int | None) -> str | None:
        """Head sizes that the kernels have no tile for."""
        return (
            None
            if head_dim is None
            else native_attention_requirement(recipe, head_dim=head_dim).reason or None
        )

    def self_check(
        self,
        recipe: AttentionRecipe,
        grad_scores: GradScores,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """See :meth:`AttentionBackend.self_check`. On CUDA devices; interpreted kernels have tests."""
        if device.type == "cuda":
            from foundry_fp8.backends.native.attention_check import check_attention_kernels

            check_attention_kernels(recipe, grad_scores, head_dim, dtype, device)

    def call_reason(
        self,
        module: FP8DotProductAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        dropout_p: float,
    ) -> Availability:
        """See :meth:`AttentionBackend.call_reason`."""
        assert module.recipe is not None
        found = native_attention_requirement(
            module.recipe, head_dim=q.shape[-1], bias=mask.bias is not None, dropout_p=dropout_p
        )
        if found.ok and (q.dtype not in HP_DTYPES or v.shape[-1] != q.shape[-1]):
            said = f"queries are {tuple(q.shape)} {q.dtype}, values {tuple(v.shape)}"
            found = Availability(False, said, "Set precision: amp_bf16, and one head size for both.")
        return found

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
        """See :meth:`AttentionBackend.attend`.

        Raises:
            RuntimeError: The kernels have no form for this call, with the reason and the way out.
        """
        assert module.recipe is not None
        found = self.call_reason(module, q, k, v, mask, dropout_p)
        if not found.ok:
            raise RuntimeError(
                f"{module.fqn}: FP8 attention cannot run on the native backend: {found.reason}. {found.remedy}"
            )
        b, h, queries, d = q.shape
        left, right = mask.window or (None, None)
        call = _Call(
            recipe=module.recipe,
            sizes=[b, h, k.shape[1], queries, k.shape[2], d],
            positions=(softmax_scale, left, min(0, right or 0) if mask.causal else right),
            scales={slot: module.slots[slot].scale for slot in attention_slots(module.recipe)},
            amaxes=module.amaxes(),
            fp8_scores=module.grad_scores == "fp8",
            probe=module.probe,
        )
        segments = _segments(mask, b, queries, k.shape[2])
        with torch.autocast(q.device.type, enabled=False):
            out: Tensor = _Attention.apply(q, k, v, *segments, call)  # type: ignore[no-untyped-call]
        return out


def native_attention_requirement(
    recipe: Recipe, *, head_dim: int = LARGEST_HEAD, bias: bool = False, dropout_p: float = 0.0
) -> Availability:
    """Whether the kernels have a form for such an attention; if not, why, and what would change that.

    Args:
        recipe: The attention's recipe.
        head_dim: Its head size.
        bias: Something is added to the logits.
        dropout_p: Probability of dropping a probability.
    """
    otherwise = "Set attention: false, or backend: emulated to check numerics."
    formless = no_attention_form(recipe)
    if formless is not None:
        return Availability(False, formless, "Set recipe: delayed or current, or attention: false.")
    if head_dim > LARGEST_HEAD or head_dim % HEAD_MULTIPLE:
        reason = f"head_dim is {head_dim}, and the native kernels take multiples of {HEAD_MULTIPLE} up to {LARGEST_HEAD}"
        return Availability(False, reason, otherwise)
    if bias:
        reason = "the native kernels have no form for something added to the logits (ALiBi, a dense mask)"
        return Availability(False, reason, otherwise)
    if dropout_p:
        reason = f"the native kernels have no dropout (here {dropout_p:g})"
        return Availability(False, reason, f"Set the model's attention dropout to 0. {otherwise}")
    return Availability(True)


def _segments(
    mask: AttentionMask, batch: int, queries: int, keys: int
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Padding and documents as one number a query and one a key; a query sees keys of its own."""
    padding, documents = mask.key_padding, mask.documents
    if padding is None and documents is None:
        return None, None
    given = documents if documents is not None else padding
    assert given is not None
    of_keys = torch.zeros_like(given, dtype=torch.int32) if documents is None else documents.to(torch.int32)
    of_queries = of_keys[:, keys - queries :]
    if padding is not None:
        of_keys = torch.where(padding.bool(), of_keys, HIDDEN)
    return of_queries.expand(batch, -1).contiguous(), of_keys.expand(batch, -1).contiguous()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """What one forward and its backward share besides tensors with gradients."""

    recipe: AttentionRecipe
    sizes: list[int]
    positions: tuple[float, int | None, int | None]
    """softmax_scale, left, right."""
    scales: dict[str, Tensor]
    amaxes: dict[str, Tensor]
    """Where the amax of a slot goes, if anywhere."""
    fp8_scores: bool
    """Whether the logits' gradients are rounded to FP8."""
    probe: AttentionProbe | None

    def quantize(self, name: str, x: Tensor, *, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` [b, heads, s, d] as FP8 [b * s, heads * d], its transpose if asked for, and (amax, gemm_scale, scale_inv)."""
        from foundry_fp8.backends.native.operand import Source  # Triton is imported there
        from foundry_fp8.backends.native.ops import unnoticed

        rows = by_tokens(x)
        operand: Operand = "dy" if name == "do" else "x"
        plan, slot = plan_of(self.recipe), SLOTS[name]
        layout, layout_t, stats, _ = Source(rows).quantize(
            operand,
            plan,
            direct=unnoticed(),
            rows=True,
            columns=columns,
            scale=self.scales.get(slot),
            amax_slot=self.amaxes.get(slot),
        )
        if self.probe is not None:
            fmt = attention_format(self.recipe, slot)
            self.probe(name, rows, quantized_view(rows, operand, self.recipe, fmt, layout, stats))
        return layout[0], layout_t[0], stats


class _Attention(torch.autograd.Function):
    """Keeps Q, K and V in FP8, O, and a number a query."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_segments: Tensor | None,
        k_segments: Tensor | None,
        call: _Call,
    ) -> Tensor:
        from foundry_fp8.backends.native import attention_ops

        q8, _, q_stats = call.quantize("q", q, columns=False)
        k8, _, k_stats = call.quantize("k", k, columns=False)
        v8, v_t, v_stats = call.quantize("v", v, columns=True)
        scales = tuple(stats.select(0, 1) for stats in (q_stats, k_stats, v_stats))
        out, lse = attention_ops.attention_forward(
            q8,
            k8,
            v_t,
            *scales,
            q_segments,
            k_segments,
            call.amaxes.get("s"),
            call.sizes,
            *call.positions,
            q.dtype,
        )
        saved = (q8, k8, v8, *scales, out, lse, q_segments, k_segments)
        ctx.save_for_backward(*renamed_for_dynamo(saved))
        ctx.call = call
        output: Tensor = out.transpose(1, 2)
        return output

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        from foundry_fp8.backends.native import attention_ops

        call: _Call = ctx.call
        do8, do_t, do_stats = call.quantize("do", do, columns=True)
        amax_dp = torch.zeros((), dtype=torch.float32, device=do.device)
        gradients = attention_ops.attention_backward(
            *ctx.saved_tensors,
            do8,
            do_t,
            do_stats.select(0, 1),
            call.scales["dp"] if call.fp8_scores else None,
            amax_dp,
            call.sizes,
            *call.positions,
        )
        if "dp" in call.amaxes:
            torch.fmax(call.amaxes["dp"], amax_dp, out=call.amaxes["dp"])
        return (*(gradient.transpose(1, 2) for gradient in gradients), None, None, None)
