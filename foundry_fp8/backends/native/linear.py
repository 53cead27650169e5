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
where ``nn.Linear`` keeps two or four; and the weight itself, which is quantised again (with its first amax), for an FP8 copy
of every weight can take more memory than the activations give back. Where there is room for one (:mod:`.room`), the weight is
read once too, and its transposed layout stays until backward. ``cache_weights: true`` keeps both for a whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_fp8.backends.native.ahead import Ahead
from foundry_fp8.backends.native.inputs import LinearCall
from foundry_fp8.backends.native.ops import produce, unnoticed
from foundry_fp8.backends.native.passes import Job, pass_of
from foundry_fp8.backends.native.plan import FORMATS, Layout, Plan, QuantizedWeight, quantized_view
from foundry_fp8.backends.native.scaling import SCALINGS
from foundry_fp8.backends.native.scaling.base import Output, Quantised
from foundry_fp8.backends.native.source import BOTH, BY_COLUMNS, BY_ROWS, LAYOUTS, Source
from foundry_fp8.compat.fresh_view import in_shape
from foundry_fp8.kernels.launch import as_rows
from foundry_fp8.kernels.zeros import statistics
from foundry_fp8.layers.frozen_weight import in_dtype
from foundry_fp8.layers.produced import Produced
from foundry_fp8.layers.shared_inputs import QuantizedInput
from foundry_fp8.numerics.recipes import Gemm

__all__ = ["SAVED", "NativeLinear", "dgrad_and_wgrad", "fprop", "quantize_weight"]


class NativeLinear(torch.autograd.Function):
    """``y = x @ w.T + b`` with the GEMMs above; ``torch.compile`` traces it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        given: tuple[LinearCall, QuantizedWeight | None, QuantizedInput | None, bool, bool, Ahead | None],
    ) -> Tensor:
        """Run fprop.

        Args:
            ctx: autograd's.
            x: ``[..., K]``, hp, in memory or not (:class:`~foundry_fp8.layers.produced.Produced`); ``[M, K]`` where this is traced.
            weight: ``[N, K]``, hp.
            bias: ``[N]``, hp, or ``None``.
            given: Everything else; this weight quantised, if it is already; what other linears made of this x, and where to note what
                this one makes; whether the weight's transposed layout, made in this forward, stays until backward; whether a backward
                can come, which ``needs_input_grad`` does not say: under ``no_grad`` it is as with gradients; what else reads this x.
        """
        call, cached, shared, keep_w, grad, ahead = given
        needs_w = ctx.needs_input_grad[1]
        hp_wgrad = call.wgrad == "high_precision"
        keep_x = needs_w and not hp_wgrad and grad
        # Here and not outside of the function, where autograd would make a node of each change of shape.
        ctx.shape = None if x.dim() == 2 else x.shape
        if type(x) is Produced:
            source = x.source
        else:
            source = Source(x if ctx.shape is None else x.reshape(-1, ctx.shape[-1]))
        keep_w &= ctx.needs_input_grad[0]
        y, saved = fprop(
            source, weight, bias, call, cached=cached, keep_x=keep_x, keep_w=keep_w, shared=shared, ahead=ahead,
        )  # fmt: skip
        ctx.kept_w = (
            saved[4:] if keep_w else None
        )  # no saved tensor: who packs or recomputes those leaves it alone
        saved = (*saved[:4], None, None) if keep_w else saved
        hp_x = x if needs_w and hp_wgrad else None
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
        if ctx.kept_w is not None:  # a second backward through this node quantises again
            saved[4:], ctx.kept_w = ctx.kept_w, None
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        needs = (needs_x, needs_w and hp_x is None, needs_b)
        if ctx.shape is not None:
            dy = dy.reshape(-1, dy.shape[-1])
        dx, dw, db = dgrad_and_wgrad(dy, saved, ctx.call, ctx.x_dtype, needs=needs)
        if hp_x is not None:
            hp_x = hp_x if ctx.shape is None else hp_x.reshape(-1, ctx.shape[-1])
            dw = (dy.t() @ hp_x * ctx.call.plan.alpha).to(saved[0].dtype)
        if dx is not None and ctx.shape is not None:
            dx = in_shape(dx, *ctx.shape)
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
    keep_w: bool = False,
    cached: QuantizedWeight | None = None,
    shared: QuantizedInput | None = None,
    ahead: Ahead | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """``Y = X W^T + b``.

    Args:
        source: What produces x, ``[M, K]``.
        weight: ``[N, K]``, hp.
        bias: ``[N]``, hp, or ``None``.
        call: Recipe, delayed scaling's state of x and the weight, and who is shown both.
        keep_x: Make what wgrad needs.
        keep_w: Make what dgrad needs of the weight.
        cached: The weight, if it is quantised already.
        shared: What other linears made of this x, and where to note what this one makes.
        ahead: Other linears' weights, quantised beside this one where nobody watches.

    Returns:
        ``Y`` in the dtype of x, and what :func:`dgrad_and_wgrad` needs.
    """
    plan, probe, direct, scaling = call.plan, call.probe, unnoticed(), SCALINGS[call.plan.kind]
    x = source.x
    reads_w = cached is None or probe is not None or call.fprop == "high_precision"
    w = in_dtype(weight, x.dtype) if reads_w else weight
    given = source if source.kind else x
    rows = None if shared is None else shared.get("rows")
    columns = shared.get("columns") if shared is not None and keep_x else None
    layouts = LAYOUTS[rows is None, keep_x and columns is None, False]
    reads_x = layouts.rows or layouts.columns
    weights, states = ([w], [call.w]) if cached is None else ([], [])
    if ahead is not None and direct:
        weights += [in_dtype(one, x.dtype) for one in ahead.weights]
        states += ahead.states
    if weights or reads_x:
        run = pass_of("x", x, given, weights, plan, (call.x, *states), direct=direct)
        count = 1 + len(weights)
        pieces = statistics(x.device, count) if run.has_statistics else (None,) * count
        if run.copies:
            given = _by_rows(given)
        # Scales get no local name here: Dynamo names a graph's inputs by locals, and then finds another one for dy in backward
        # (seen with torch 2.7; test_compiles_whole_and_gives_the_same_bits shows it).
        jobs: list[Job] = []
        if reads_x:
            amax = rows[2] if rows is not None and scaling.follows_amax else None
            jobs.append((0, given, pieces[0], layouts, (call.x[0], amax, call.x[1])))
        w_layouts = BOTH if keep_w else BY_ROWS
        for i, one in enumerate(weights):
            amaxes = states[i][0], None, states[i][1]
            jobs.append((i + 1, one, pieces[i + 1], w_layouts, amaxes))
        made = run.quantize(jobs)
        if reads_x:
            by_rows, transposed, stats, _ = made.pop(0)
            rows = (*by_rows, stats) if layouts.rows else rows
            columns = transposed if layouts.columns else columns
            if shared is not None:
                assert rows is not None
                shared.put("rows", *rows)
                if columns is not None:
                    shared.put("columns", *columns)
        if cached is None:
            cached = _weight(made.pop(0), keep_w)
        if ahead is not None:
            ahead.made = [_weight(one, keep_w) for one in made]
    assert rows is not None and cached is not None
    qx, x_stats, (qw, qw_t, w_stats) = rows[:2], rows[2], cached
    if probe is not None:
        assert call.recipe is not None
        x = _in_memory(given)
        probe("x", x, quantized_view(x, "x", call.recipe, FORMATS[plan.x_fmt], qx, x_stats))
        probe("w", w, quantized_view(w, "w", call.recipe, FORMATS[plan.x_fmt], qw, w_stats))
    added = None if bias is None else in_dtype(bias, x.dtype)
    out = x.shape[0], weight.shape[0], x.dtype
    if call.fprop == "fp8":
        y = scaling.multiply("fprop", qx, qw, plan, out, added, direct=direct)
    elif call.fprop == "dequantized":
        y = _dequantized("fprop", qx, qw, plan, out, added)
    else:
        y = F.linear(_in_memory(given), w, added) * plan.alpha
    return y, (weight, w_stats, *(columns or (None, None)), *qw_t)


def _weight(made: Quantised, kept: bool) -> QuantizedWeight:
    by_rows, transposed, stats, _ = made
    return by_rows, transposed if kept else (None, None), stats


def _dequantized(
    which: Gemm, a: Layout, b: Layout, plan: Plan, out: Output, bias: Tensor | None = None
) -> Tensor:
    """:meth:`NativeScaling.multiply` of what the operands stand for, rounded to the dtype that it is computed in."""
    scaling, (m, n, dtype) = SCALINGS[plan.kind], out
    scales = scaling.scales(a, square=False), scaling.scales(b, square=which != "wgrad")
    dense = [
        (layout[0].float() * scale.float()).to(dtype) for layout, scale in zip((a, b), scales, strict=True)
    ]
    return F.linear(dense[0][:m], dense[1][:n], bias)


def _in_memory(source: Source | Tensor) -> Tensor:
    return source if isinstance(source, Tensor) else produce(*source)


def _by_rows(source: Source | Tensor) -> Source | Tensor:
    return as_rows(source) if isinstance(source, Tensor) else source._replace(x=as_rows(source.x))


def dgrad_and_wgrad(
    dy: Source | Tensor,
    saved: Sequence[Tensor | None],
    call: LinearCall,
    x_dtype: torch.dtype,
    *,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``dX = dY W``, ``dW = dY^T X`` and the bias gradient, from one pass over dy.

    Args:
        dy: ``[M, N]``, hp, or what produces it.
        saved: From :func:`fprop`.
        call: That of the forward.
        x_dtype: dtype of ``dX``.
        needs: Which of ``dX``, ``dW`` and the bias gradient to compute.

    Returns:
        The three; ``dW`` in the weight's dtype, the bias gradient in float32.
    """
    weight, w_stats, kept_x, kept_x_scale, kept_w, kept_w_scale = saved
    assert weight is not None and w_stats is not None
    plan, probe, w_scale, scaling = call.plan, call.probe, call.w[0], SCALINGS[call.plan.kind]
    tensor: Tensor = dy.x if type(dy) is Source else dy  # type: ignore[assignment]
    (m, n), k, w_dtype = tensor.shape, weight.shape[1], weight.dtype
    needs_x, needs_w, needs_b = needs
    if not (needs_x or needs_w):
        return None, None, _in_memory(dy).float().sum(0) if needs_b else None
    kept = kept_w is not None and kept_w_scale is not None
    direct = unnoticed()
    weights = [in_dtype(weight, x_dtype)] if needs_x and not kept and call.dgrad != "high_precision" else []
    run = pass_of("dy", tensor, dy, weights, plan, (call.dy, (w_scale, None)), direct=direct)
    pieces = statistics(tensor.device, 1 + len(weights)) if run.has_statistics else (None, None)
    if run.copies:
        dy = _by_rows(dy)
    layouts = LAYOUTS[needs_x or probe is not None, needs_w, needs_b]
    job: Job = 0, dy, pieces[0], layouts, (call.dy[0], None, call.dy[1])
    qw_t: Any = (kept_w, kept_w_scale)
    if weights:
        known = w_stats if scaling.follows_amax and w_scale is None else None
        of_w: Job = 1, weights[0], pieces[1], BY_COLUMNS, (w_scale, known, None)
        made, (_, qw_t, _, _) = run.quantize((job, of_w))
    else:
        (made,) = run.quantize((job,))
    qdy, qdy_t, dy_stats, column_sum = made
    if probe is not None:
        assert call.recipe is not None
        hp = _in_memory(dy)
        probe("dy", hp, quantized_view(hp, "dy", call.recipe, FORMATS[plan.dy_fmt], qdy, dy_stats))
    dx = dw = None
    if needs_x and call.dgrad == "high_precision":
        dx = _in_memory(dy) @ in_dtype(weight, x_dtype) * plan.alpha
    elif needs_x:
        if call.dgrad == "fp8":
            dx = scaling.multiply("dgrad", qdy, qw_t, plan, (m, k, x_dtype), direct=direct)
        else:
            dx = _dequantized("dgrad", qdy, qw_t, plan, (m, k, x_dtype))
    if needs_w:
        assert kept_x is not None and kept_x_scale is not None
        x_t = kept_x, kept_x_scale
        if call.wgrad == "fp8":
            dw = scaling.multiply("wgrad", qdy_t, x_t, plan, (n, k, x_dtype), direct=direct)
        else:
            dw = _dequantized("wgrad", qdy_t, x_t, plan, (n, k, x_dtype))
        if x_dtype != w_dtype:
            dw = in_dtype(dw, w_dtype)
    return dx, dw, column_sum if needs_b else None


def quantize_weight(
    weight: Tensor, plan: Plan, *, scale: Tensor | None = None, amax_slot: Tensor | None = None
) -> QuantizedWeight:
    """Both layouts of a weight (``[N, K]``, in the compute dtype) in one pass, to be kept across microbatches."""
    rows, transposed, stats, _ = SCALINGS[plan.kind].quantize(
        Source(weight), "w", plan, BOTH, (scale, None, amax_slot), direct=unnoticed()
    )
    return rows, transposed, stats
