"""Activation functions that keep their inputs, packed or as they are, and recompute everything else in backward.

    gated      h = act(gate) * up, y = h @ W.T + b    keeps gate and up; act(gate), h are recomputed
    plain      h = act(x),         y = h @ W.T + b    keeps x; act may be xIELU with its two trainable slopes

The forward is the module's own expression, so it is exact. Backward uses the closed forms below on what was kept.

Source:
    DeepSeek-V3 (arXiv:2412.19437) section 3.3.3 keeps SwiGLU inputs in FP8 and recomputes its output; COAT
    (arXiv:2410.19313) section 4 does so for activation functions with per-group scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from foundry_fp8.activations.compression.recompute import (
    MaybePacked,
    fuses,
    pack_if,
    save_inputs,
    saved_inputs,
    unpacked,
)
from foundry_fp8.layers.autocast import autocast_type
from foundry_fp8.numerics.packed import Packed, PackFormat

__all__ = ["ActivationKind", "packed_activation"]

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "xielu"]


def packed_activation(
    gate: Tensor,
    up: Tensor | None,
    act: Callable[[Tensor], Tensor],
    kind: ActivationKind,
    fmt: PackFormat | None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """``act(gate) * up`` (``act(gate)`` without ``up``) that keeps nothing but its inputs.

    Args:
        gate: Any shape, hp.
        up: The shape and dtype of ``gate``, or ``None``.
        act: The activation function, for an exact forward.
        kind: Which function ``act`` is, for backward.
        fmt: How to pack them; ``None`` keeps them as they are, and gradients are exact.
        weight: ``[out_features, in_features]`` of a linear to put behind it, whose input, the product, is recomputed too.
        bias: The linear's.
        slopes: xIELU's ``(alpha_p, alpha_n)``, float32 ``[2]``, which get their gradients from here.
    """
    if fuses(gate, up):
        return _PackedActivation.apply(gate, up, weight, bias, slopes, act, kind, fmt)
    h = _product(act, gate, up)
    return h if weight is None else F.linear(h, weight, bias)


def _product(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor | None) -> Tensor:
    return act(gate) if up is None else act(gate) * up


class _PackedActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        slopes: Tensor | None,
        act: Callable[[Tensor], Tensor],
        kind: ActivationKind,
        fmt: PackFormat | None,
    ) -> Tensor:
        ctx.act, ctx.kind, ctx.shape = act, kind, gate.shape
        ctx.dtype, ctx.numel = gate.dtype, gate.numel()
        ctx.bias_dtype = None if bias is None else bias.dtype
        save_inputs(ctx, [pack_if(x, fmt) for x in (gate, up) if x is not None], weight, slopes)
        h = _product(act, gate, up)
        if weight is None:
            ctx.recompute = _recompute_activation
            return h
        y = F.linear(h, weight, bias)  # autocast, where it is on, acts here as in nn.Linear
        ctx.compute_dtype = y.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, (weight, slopes) = saved_inputs(ctx)
        db = None
        found: tuple[Tensor | None, ...]
        with torch.autocast(autocast_type(dy.device), enabled=False):
            gate, up = kept[0], kept[1] if len(kept) == 2 else None
            if _kernel_takes(gate) and _kernel_takes(up) and ctx.kind in ("silu", "gelu"):
                found = (*_gradients_by_kernel(ctx, dy, gate, up, weight), None)  # type: ignore[arg-type]
            else:
                found = _gradients(ctx, dy, gate, up, weight, slopes)
            if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
                db = dy.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        dgate, dup, dw, dslopes = found
        return dgate, dup, dw, db, dslopes, None, None, None


def _dh(ctx: Any, dy: Tensor, weight: Tensor | None) -> Tensor:
    return dy if weight is None else (dy @ weight.to(ctx.compute_dtype)).to(ctx.dtype)


def _dw(ctx: Any, dy: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    return (dy.flatten(0, -2).t() @ h.to(ctx.compute_dtype).flatten(0, -2)).to(weight.dtype)


def _kernel_takes(kept: MaybePacked | None) -> bool:
    return isinstance(kept, Packed) and kept.codes.is_cuda and kept.fmt.name != "int4"


def _gradients_by_kernel(
    ctx: Any, dy: Tensor, gate: Packed, up: Packed, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(dgate, dup, dw)`` from the codes themselves, in one pass."""
    from foundry_fp8.kernels.packing import gated_backward

    dh = _dh(ctx, dy, weight)
    dgate, dup, h = (x.view(ctx.shape) for x in gated_backward(dh.reshape(-1), gate, up, ctx.kind))
    return dgate, dup, _dw(ctx, dy, weight, h) if weight is not None and ctx.needs_input_grad[2] else None


def _gradients(
    ctx: Any,
    dy: Tensor,
    kept_gate: MaybePacked,
    kept_up: MaybePacked | None,
    weight: Tensor | None,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """``(dgate, dup, dw, dslopes)``.

    The weight's gradient comes first, and h goes before dh comes: together they would be the peak of the step.
    """
    gate = unpacked(kept_gate, ctx.shape)
    up = None if kept_up is None else unpacked(kept_up, ctx.shape)
    dw = dup = None
    if weight is not None and ctx.needs_input_grad[2]:
        dw = _dw(ctx, dy, weight, ctx.act(gate) if up is None else (dup := ctx.act(gate)) * up)
    dh = _dh(ctx, dy, weight)
    if up is not None:
        dup = (ctx.act(gate) if dup is None else dup).mul_(dh)
        dh = dh * up
    if slopes is not None:
        dgate, dslopes = _xielu_backward(dh, gate, slopes)
        return dgate, dup, dw, dslopes
    if ctx.kind == "silu":
        return torch.ops.aten.silu_backward(dh, gate), dup, dw, None
    approximate = "tanh" if ctx.kind == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(dh, gate, approximate=approximate), dup, dw, None


def _recompute_activation(ctx: Any) -> Tensor:
    gate, *up = (unpacked(k, ctx.shape) for k in saved_inputs(ctx)[0])
    with torch.no_grad():
        return _product(ctx.act, gate, up[0] if up else None)


def _xielu_backward(dh: Tensor, x: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """``dh * f'(x)``, and the gradient of ``slopes = (ap, an)``, float32, of :class:`~foundry_fp8.models.fog.feedforward.XIELU`::

        x > 0:   f' = 2 ap x + 1/2          df/dap = x^2
        x <= 0:  f' = an expm1(x) + 1/2     df/dan = expm1(x) - x       expm1 at min(x, -1e-6)

    Autograd of the clamp has ``1/2 - an`` between -1e-6 and 0, a jump that an input rounded to 0 would fall into.
    """
    if dh.is_cuda:
        from foundry_fp8.kernels.gated import xielu_backward

        dx, dslopes = xielu_backward(dh.reshape(-1, x.shape[-1]), x.reshape(-1, x.shape[-1]), slopes)
        return dx.view(x.shape), dslopes
    dtype, dh, x = x.dtype, dh.float(), x.float()
    ap, an = slopes.unbind()
    positive = x > 0
    bend = torch.expm1(x.clamp(max=-1e-6))
    dx = dh * torch.where(positive, 2.0 * ap * x, an * bend).add_(0.5)
    dap = torch.where(positive, dh * x.square(), 0.0).sum()
    dan = torch.where(positive, 0.0, dh * (bend - x)).sum()
    return dx.to(dtype), torch.stack((dap, dan))
