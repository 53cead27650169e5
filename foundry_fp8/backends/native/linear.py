"""The three GEMMs of a linear as one autograd function.

====== ============================== =======================================
GEMM   product                        operands
====== ============================== =======================================
fprop  ``Y = X W^T``                  x by rows, w by rows
dgrad  ``dX = dY W``                  dy by rows, w transposed
wgrad  ``dW = dY^T X``                dy transposed, x transposed
====== ============================== =======================================

How Hopper adds each of them up is the recipe's choice (``fast_accumulation``).

Each of x and dy is read once and written in both layouts. Kept for backward: the transposed FP8 x, one byte an element
where ``nn.Linear`` keeps two or four; and the weight itself, which is quantised again (with its first amax) because an
FP8 copy of every weight would take more memory than the activations give back. ``NativeBackend.cache_weights`` keeps
the copies instead, for a whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.backends.native.eager import EagerPass, Kind, eager_pass
from foundry_fp8.backends.native.inputs import LinearCall
from foundry_fp8.backends.native.operand import Source, gemm
from foundry_fp8.backends.native.ops import produce, unnoticed
from foundry_fp8.backends.native.plan import FORMATS, Layout, Plan, quantized_view
from foundry_fp8.compat.fresh_view import in_shape
from foundry_fp8.kernels.launch import as_rows, on_current_device
from foundry_fp8.kernels.zeros import Statistics
from foundry_fp8.layers.frozen_weight import in_dtype
from foundry_fp8.layers.produced import Produced
from foundry_fp8.layers.shared_inputs import QuantizedInput

__all__ = ["SAVED", "NativeLinear", "dgrad_and_wgrad", "fprop", "quantize_weight"]


class NativeLinear(torch.autograd.Function):
    """``y = x @ w.T + b`` with the GEMMs above; ``torch.compile`` traces it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        given: tuple[LinearCall, tuple[Layout, Layout, Tensor] | None, QuantizedInput | None],
    ) -> Tensor:
        """Run fprop.

        Args:
            ctx: autograd's.
            x: ``[..., K]``, hp, in memory or not (:class:`~foundry_fp8.layers.produced.Produced`); ``[M, K]`` where this is traced.
            weight: ``[N, K]``, hp.
            bias: ``[N]``, hp, or ``None``.
            given: Everything else; what :func:`quantize_weight` made of this weight earlier; what other linears made of this x, and
                where to note what this one makes.
        """
        call, cached, shared = given
        needs_w = ctx.needs_input_grad[1]
        keep_x = needs_w and call.fp8_wgrad
        # Here and not outside of the function, where autograd would make a node of each change of shape.
        ctx.shape = None if x.dim() == 2 else x.shape
        if type(x) is Produced:
            source = x.source
        else:
            source = Source(x if ctx.shape is None else x.reshape(-1, ctx.shape[-1]))
        y, saved = fprop(source, weight, bias, call, cached=cached, keep_x=keep_x, shared=shared)
        hp_x = x if needs_w and not call.fp8_wgrad else None
        ctx.reads_smoothly = hp_x is not None  # a product: activation compression may round x
        ctx.save_for_backward(hp_x, *saved)
        # Not saved for backward: they are the state's own, and what they hold by then is what backward shall read.
        ctx.call = call
        ctx.calls_at_backward = None  # FP8Linear's ledger
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        return y if ctx.shape is None else in_shape(y, *ctx.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Run dgrad and wgrad, as far as they are needed."""
        if ctx.calls_at_backward is not None:
            ctx.calls_at_backward()
        hp_x, *saved = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        needs = (needs_x, needs_w and hp_x is None, needs_b)
        if ctx.shape is not None:
            dy = dy.reshape(-1, dy.shape[-1])
        dx, dw, db = dgrad_and_wgrad(dy, saved, ctx.call, ctx.x_dtype, needs=needs)
        if hp_x is not None:
            hp_x = hp_x if ctx.shape is None else hp_x.reshape(-1, ctx.shape[-1])
            dw = (dy.t() @ hp_x * ctx.call.plan.alpha).to(saved[0].dtype)
        if dx is not None and ctx.shape is not None:
            dx = dx.view(ctx.shape)
        return dx, dw, None if db is None else db.to(ctx.bias_dtype), None


SAVED = 6
"""What :func:`fprop` keeps for backward: so many tensors, or places of some."""


def fprop(
    source: Source,
    weight: Tensor,
    bias: Tensor | None,
    call: LinearCall,
    *,
    keep_x: bool,
    cached: tuple[Layout, Layout, Tensor] | None = None,
    shared: QuantizedInput | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """``Y = X W^T + b``.

    Args:
        source: What produces x, ``[M, K]``.
        weight: ``[N, K]``, hp.
        bias: ``[N]``, hp, or ``None``.
        call: Recipe, delayed scaling's state of x and the weight, and who is shown both.
        keep_x: Make what wgrad needs.
        cached: The weight, if it is quantised already.
        shared: What other linears made of this x, and where to note what this one makes.

    Returns:
        ``Y`` in the dtype of x, and what :func:`dgrad_and_wgrad` needs.
    """
    x, plan, probe, direct = source.x, call.plan, call.probe, unnoticed()
    w_hp = in_dtype(weight, x.dtype)
    eager: EagerPass | None = None
    x_piece = w_piece = x_amax = w_amax = None
    if direct and plan.granularity != "row" and on_current_device(x):
        eager = eager_pass("x", x, source if source.kind else None, w_hp, plan, call.x, call.w)
        x_piece, w_piece = eager.pieces(x.device)
        if eager.first.copies:
            source = source._replace(x=as_rows(x))
    if plan.granularity == "tensor" and call.x[0] is None and cached is None and not _is_there(shared):
        if eager is not None:
            x_amax, w_amax = eager.measure(source, x_piece, w_hp, w_piece)
        else:
            x_amax, w_amax = source.amax_with(w_hp, direct=direct)
    kind = None if eager is None else eager.first
    qx, x_stats, kept_x = _quantize_input(source, call, keep_x, shared, x_amax, direct, kind, x_piece)
    if cached is not None:
        qw, _, w_stats = cached
    elif eager is not None:
        qw, _, w_stats, _ = eager.w.quantize(
            w_hp,
            w_piece,
            rows=True,
            columns=False,
            scale=call.w[0],
            known_amax=w_amax,
            amax_slot=call.w[1],
        )
    else:
        qw, _, w_stats, _ = Source(w_hp).quantize(
            "w",
            plan,
            direct=direct,
            rows=True,
            columns=False,
            scale=call.w[0],
            known_amax=w_amax,
            amax_slot=call.w[1],
        )
    if probe is not None:
        assert call.recipe is not None
        x = x if source.kind == 0 else produce(*source)
        probe("x", x, quantized_view(x, "x", call.recipe, FORMATS[plan.x_fmt], qx, x_stats))
        probe("w", w_hp, quantized_view(w_hp, "w", call.recipe, FORMATS[plan.x_fmt], qw, w_stats))
    y = gemm(
        "fprop",
        qx,
        qw,
        plan,
        m=x.shape[0],
        n=weight.shape[0],
        out_dtype=x.dtype,
        bias=None if bias is None else in_dtype(bias, x.dtype),
        direct=direct,
    )
    kept_w = (None, None) if cached is None else cached[1]
    return y, (weight, w_stats, *kept_x, *kept_w)


def _is_there(shared: QuantizedInput | None) -> bool:
    return shared is not None and shared.get("rows") is not None


def _quantize_input(
    source: Source,
    call: LinearCall,
    keep_x: bool,
    shared: QuantizedInput | None,
    amax: Tensor | None,
    direct: bool,
    kind: Kind | None,
    piece: Statistics | None,
) -> tuple[Layout, Tensor, tuple[Tensor | None, ...]]:
    """The input by rows, its statistics, and what to keep: data and scale of the transposed layout. Made unless there already."""
    plan = call.plan
    rows = None if shared is None else shared.get("rows")
    columns = shared.get("columns") if shared is not None and keep_x else None
    make_columns = keep_x and columns is None
    if rows is not None and not make_columns:
        return rows[:2], rows[2], columns or (None, None)
    known = rows[2] if rows is not None and plan.granularity == "tensor" else amax
    # Scales get no local name here: Dynamo names a graph's inputs by locals, and then finds another one for dy in backward
    # (seen with torch 2.7; test_compiles_whole_and_gives_the_same_bits shows it).
    if kind is not None:
        by_rows, transposed, stats, _ = kind.quantize(
            source.x,
            piece,
            source=source if source.kind else None,
            rows=rows is None,
            columns=make_columns,
            scale=call.x[0],
            known_amax=known,
            amax_slot=call.x[1],
        )
    else:
        by_rows, transposed, stats, _ = source.quantize(
            "x",
            plan,
            direct=direct,
            rows=rows is None,
            columns=make_columns,
            scale=call.x[0],
            known_amax=known,
            amax_slot=call.x[1],
        )
    if rows is None:
        rows = *by_rows, stats
        if shared is not None:
            shared.put("rows", *rows)
    if make_columns:
        columns = transposed
        if shared is not None:
            shared.put("columns", *columns)
    return rows[:2], rows[2], columns or (None, None)


def dgrad_and_wgrad(
    dy: Tensor,
    saved: Sequence[Tensor | None],
    call: LinearCall,
    x_dtype: torch.dtype,
    *,
    needs: tuple[bool, bool, bool],
    source: Source | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``dX = dY W``, ``dW = dY^T X`` and the bias gradient, from one pass over dy.

    Args:
        dy: ``[M, N]``, hp.
        saved: From :func:`fprop`.
        call: That of the forward.
        x_dtype: dtype of ``dX``.
        needs: Which of ``dX``, ``dW`` and the bias gradient to compute.
        source: What produces dy, of its own ``x``, which stands for it as ``dy`` here; ``None``: dy is in memory.

    Returns:
        The three; ``dW`` in the weight's dtype, the bias gradient in float32.
    """
    weight, w_stats, kept_x, kept_x_scale, kept_w, kept_w_scale = saved
    assert weight is not None and w_stats is not None
    plan, probe, w_scale = call.plan, call.probe, call.w[0]
    (m, n), k, w_dtype = dy.shape, weight.shape[1], weight.dtype
    needs_x, needs_w, needs_b = needs
    if not (needs_x or needs_w):
        dy = dy if source is None or not needs_b else produce(*source)
        return None, None, dy.float().sum(0) if needs_b else None
    made_here = needs_x and (kept_w is None or kept_w_scale is None)
    if made_here:
        weight = in_dtype(weight, x_dtype)
    eager: EagerPass | None = None
    w_piece: Statistics | None = None
    direct = unnoticed()
    if direct and plan.granularity != "row" and on_current_device(dy):
        eager = eager_pass("dy", dy, source, weight, plan, call.dy, (w_scale, None))
        dy_piece, w_piece = eager.pieces(dy.device)
        if eager.first.copies:
            dy = as_rows(dy)
        qdy, qdy_t, dy_stats, column_sum = eager.first.quantize(
            dy,
            dy_piece,
            source=source,
            rows=needs_x or probe is not None,
            columns=needs_w,
            column_sum=needs_b,
            scale=call.dy[0],
            amax_slot=call.dy[1],
        )
    else:
        qdy, qdy_t, dy_stats, column_sum = (Source(dy) if source is None else source).quantize(
            "dy",
            plan,
            direct=direct,
            rows=needs_x or probe is not None,
            columns=needs_w,
            column_sum=needs_b,
            scale=call.dy[0],
            amax_slot=call.dy[1],
        )
    if probe is not None:
        assert call.recipe is not None
        dy = dy if source is None else produce(*source)
        probe("dy", dy, quantized_view(dy, "dy", call.recipe, FORMATS[plan.dy_fmt], qdy, dy_stats))
    dx = dw = None
    if needs_x:
        if kept_w is not None and kept_w_scale is not None:
            qw_t = kept_w, kept_w_scale
        else:
            known = w_stats if plan.granularity == "tensor" and w_scale is None else None
            if eager is not None:
                _, qw_t, _, _ = eager.w.quantize(
                    weight, w_piece, rows=False, columns=True, scale=w_scale, known_amax=known
                )
            else:
                _, qw_t, _, _ = Source(weight).quantize(
                    "w", plan, direct=direct, rows=False, columns=True, scale=w_scale, known_amax=known
                )
        dx = gemm("dgrad", qdy, qw_t, plan, m=m, n=k, out_dtype=x_dtype, direct=direct)
    if needs_w:
        assert kept_x is not None and kept_x_scale is not None
        x_t = kept_x, kept_x_scale
        dw = in_dtype(gemm("wgrad", qdy_t, x_t, plan, m=n, n=k, out_dtype=x_dtype, direct=direct), w_dtype)
    return dx, dw, column_sum if needs_b else None


def quantize_weight(
    weight: Tensor, plan: Plan, *, scale: Tensor | None = None, amax_slot: Tensor | None = None
) -> tuple[Layout, Layout, Tensor]:
    """Both layouts of a weight (``[N, K]``, in the compute dtype) in one pass, to be kept across microbatches."""
    rows, transposed, stats, _ = Source(weight).quantize(
        "w", plan, direct=unnoticed(), rows=True, columns=True, scale=scale, amax_slot=amax_slot
    )
    return rows, transposed, stats
