"""The three GEMMs of a linear as one autograd function.

====== ============================== ======================================= =================
GEMM   product                        operands                                accumulation
====== ============================== ======================================= =================
fprop  ``Y = X W^T``                  x by rows, w by rows                    fast
dgrad  ``dX = dY W``                  dy by rows, w transposed                float32
wgrad  ``dW = dY^T X``                dy transposed, x transposed             float32
====== ============================== ======================================= =================

Each of x and dy is read once and written in both layouts. Kept for backward: the transposed FP8 x, one byte an element
where ``nn.Linear`` keeps two or four; and the weight itself, which is quantised again (with its first amax) because an
FP8 copy of every weight would take more memory than the activations give back. ``NativeBackend.cache_weights`` keeps
the copies instead, for a whole optimizer step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foundry_fp8.backends.native.operand import Layout, Plan, Source, gemm, quantized_view
from foundry_fp8.formats import E4M3, E5M2

if TYPE_CHECKING:
    from foundry_fp8.backends.base import Probe

__all__ = ["NativeLinear", "quantize_weight"]

FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}

class NativeLinear(torch.autograd.Function):
    """``y = x @ w.T + b`` with the GEMMs above. The arguments are plain, so that ``torch.compile`` can trace it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_scale: Tensor | None,
        x_slot: Tensor | None,
        w_scale: Tensor | None,
        w_slot: Tensor | None,
        dy_scale: Tensor | None,
        dy_slot: Tensor | None,
        cached: tuple[Layout, Layout, Tensor] | None,
        plan: Plan,
        fp8_wgrad: bool,
        probe: Probe | None,
    ) -> Tensor:
        """Run fprop.

        Args:
            ctx: autograd's.
            x: ``[M, K]``, hp.
            weight: ``[N, K]``, hp.
            bias: ``[N]``, hp, or ``None``.
            x_scale: Delayed scaling's scale of x, 0-d; ``None`` for the other recipes.
            x_slot: Where to record the amax of x; ``None`` for nowhere.
            w_scale: The same for the weight.
            w_slot: The same for the weight.
            dy_scale: The same for the output's gradient.
            dy_slot: The same for the output's gradient.
            cached: What :func:`quantize_weight` made of this weight earlier.
            plan: The recipe.
            fp8_wgrad: Run wgrad in FP8, otherwise in the dtype of ``x``.
            probe: Shown every operand once.
        """
        needs_x, needs_w = ctx.needs_input_grad[:2]
        keep_fp8 = needs_w and fp8_wgrad
        qx, qx_t, x_stats, _ = Source(x).quantize(
            "x", plan, rows=True, columns=keep_fp8, scale=x_scale, amax_slot=x_slot
        )
        w_hp = weight.to(x.dtype)
        if cached is None:
            qw, _, w_stats, _ = Source(w_hp).quantize(
                "w", plan, rows=True, columns=False, scale=w_scale, amax_slot=w_slot
            )
        else:
            qw, _, w_stats = cached
        if probe is not None:
            probe("x", x, quantized_view(x, "x", plan, FORMATS[plan.x_fmt], qx, x_stats))
            probe("w", w_hp, quantized_view(w_hp, "w", plan, FORMATS[plan.x_fmt], qw, w_stats))
        y = gemm(
            qx,
            qw,
            plan,
            m=x.shape[0],
            n=weight.shape[0],
            out_dtype=x.dtype,
            bias=None if bias is None else bias.to(x.dtype),
            fast_accumulation=True,
        )
        kept_x = (qx_t.data, qx_t.scale) if keep_fp8 else (x, x) if needs_w else (None, None)
        kept_w = (None, None) if cached is None else (cached[1].data, cached[1].scale)
        ctx.save_for_backward(weight, w_scale, w_stats, dy_scale, *kept_x, *kept_w)
        ctx.dy_slot, ctx.plan, ctx.fp8_wgrad, ctx.probe = dy_slot, plan, fp8_wgrad, probe
        ctx.x_dtype, ctx.columns = x.dtype, x.shape[1]
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Run dgrad and wgrad, as far as they are needed."""
        weight, w_scale, w_stats, dy_scale, kept_x, kept_x_scale, kept_w, kept_w_scale = ctx.saved_tensors
        plan: Plan = ctx.plan
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        fp8_wgrad = needs_w and ctx.fp8_wgrad
        (m, n), k = dy.shape, ctx.columns
        dx = dw = db = None
        if needs_x or fp8_wgrad:
            # Its first layout is also what a probe is shown, and what says whether an Inf is in it.
            qdy, qdy_t, dy_stats, column_sum = Source(dy).quantize(
                "dy",
                plan,
                rows=needs_x or ctx.probe is not None,
                columns=fp8_wgrad,
                column_sum=needs_b,
                scale=dy_scale,
                amax_slot=ctx.dy_slot,
            )
            db = column_sum if needs_b else None
            if ctx.probe is not None:
                shown = quantized_view(dy, "dy", plan, FORMATS[plan.dy_fmt], qdy, dy_stats)
                ctx.probe("dy", dy, shown)
        elif needs_b:
            db = dy.float().sum(0)
        if needs_x:
            if kept_w is None:
                known = None if plan.granularity != "tensor" or w_scale is not None else w_stats[:1]
                _, qw_t, _, _ = Source(weight.to(ctx.x_dtype)).quantize(
                    "w", plan, rows=False, columns=True, scale=w_scale, known_amax=known
                )
            else:
                qw_t = Layout(kept_w, kept_w_scale)
            dx = gemm(qdy, qw_t, plan, m=m, n=k, out_dtype=ctx.x_dtype)
        if fp8_wgrad:
            kept = Layout(kept_x, kept_x_scale)
            dw = gemm(qdy_t, kept, plan, m=n, n=k, out_dtype=ctx.x_dtype, weight_scales=False).to(weight.dtype)
        elif needs_w:
            dw = (dy.t() @ kept_x).to(weight.dtype)
        if db is not None:
            db = db.to(ctx.bias_dtype)
        return dx, dw, db, *([None] * 10)


def quantize_weight(
    weight: Tensor, plan: Plan, *, scale: Tensor | None = None, amax_slot: Tensor | None = None
) -> tuple[Layout, Layout, Tensor]:
    """Both layouts of a weight (``[N, K]``, in the compute dtype) in one pass, to be kept across microbatches."""
    rows, transposed, stats, _ = Source(weight).quantize(
        "w", plan, rows=True, columns=True, scale=scale, amax_slot=amax_slot
    )
    return rows, transposed, stats
