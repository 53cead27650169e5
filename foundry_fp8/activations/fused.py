"""Activation functions and norms that keep a packed input and recompute everything else in backward.

    gated      h = act(gate) * up, y = h @ W.T + b    keeps gate and up packed; act(gate), h are recomputed
    plain      h = act(x),         y = h @ W.T + b    keeps x packed; act may be xIELU with its two trainable slopes
    norm       y = norm(x)                            keeps x packed, its statistics in float32

The forward is the module's own expression, so it is exact. Backward uses the closed forms below on the unpacked input.

Source:
    DeepSeek-V3 (arXiv:2412.19437) section 3.3.3 keeps SwiGLU inputs in FP8 and recomputes its output; COAT
    (arXiv:2410.19313) section 4 does so for activation functions and norms with per-group scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from foundry_fp8.activations.packing import Packed, PackFormat, pack, packable, unpack
from foundry_fp8.activations.wrapping import autocast_type

__all__ = ["ActivationKind", "packed_activation", "packed_activation_linear", "packed_norm"]

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "xielu"]


def packed_activation(
    gate: Tensor,
    up: Tensor | None,
    act: Callable[[Tensor], Tensor],
    kind: ActivationKind,
    fmt: PackFormat,
    *,
    slopes: Tensor | None = None,
) -> Tensor:
    """``act(gate) * up`` (``act(gate)`` without ``up``) that keeps its inputs packed.

    Args:
        gate: Any shape, hp.
        up: The shape and dtype of ``gate``, or ``None``.
        act: The activation function, for an exact forward.
        kind: Which function ``act`` is, for backward.
        fmt: How to pack.
        slopes: xIELU's ``(alpha_p, alpha_n)``, float32 ``[2]``, which get their gradients from here.
    """
    if not _fuses(gate, up):
        return act(gate) if up is None else act(gate) * up
    return _PackedActivation.apply(gate, up, None, None, slopes, act, kind, fmt)


def packed_activation_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    act: Callable[[Tensor], Tensor],
    kind: ActivationKind,
    fmt: PackFormat,
    *,
    slopes: Tensor | None = None,
) -> Tensor:
    """``F.linear(act(gate) * up, weight, bias)``; the product, the linear's input, is recomputed too.

    Args:
        gate: ``[..., in_features]``, hp.
        up: The same, or ``None``.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or ``None``.
        act: See :func:`packed_activation`.
        kind: See there.
        fmt: See there.
        slopes: See there.
    """
    if not _fuses(gate, up):
        return F.linear(act(gate) if up is None else act(gate) * up, weight, bias)
    return _PackedActivation.apply(gate, up, weight, bias, slopes, act, kind, fmt)


def packed_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Callable[[Tensor], Tensor],
    *,
    eps: float,
    centred: bool,
    fmt: PackFormat,
    gain: float = 1.0,
) -> Tensor:
    """``norm(x)``, a LayerNorm (``centred``) or RMSNorm over the last dimension, that keeps ``x`` packed.

    Args:
        x: ``[..., D]``, hp.
        weight: ``[D]`` or ``None``.
        bias: ``[D]`` or ``None``.
        norm: Computes the output, weight and bias applied; for an exact forward.
        eps: Added to the variance.
        centred: Whether the mean is subtracted.
        fmt: How to pack.
        gain: What ``norm`` multiplies with where it has no weight.
    """
    if not _fuses(x, None):
        return norm(x)
    return _PackedNorm.apply(x, weight, bias, norm, eps, centred, fmt, gain)


def _fuses(x: Tensor, other: Tensor | None) -> bool:
    if not torch.is_grad_enabled() or not packable(x):
        return False
    return other is None or (packable(other) and other.dtype == x.dtype and other.shape == x.shape)


def _keep(ctx: Any, packed: list[Packed], *others: Tensor | None) -> None:
    ctx.save_for_backward(*(t for p in packed for t in (p.codes, p.scale_inv)), *others)
    ctx.packed = [(p.fmt, p.numel, p.dtype) for p in packed]


def _kept(ctx: Any) -> tuple[list[Packed], list[Tensor | None]]:
    tensors = ctx.saved_tensors
    n = len(ctx.packed)
    packed = [Packed(tensors[2 * i], tensors[2 * i + 1], *ctx.packed[i]) for i in range(n)]
    return packed, list(tensors[2 * n :])


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
        fmt: PackFormat,
    ) -> Tensor:
        ctx.act, ctx.kind, ctx.shape = act, kind, gate.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        _keep(ctx, [pack(gate, fmt)] if up is None else [pack(gate, fmt), pack(up, fmt)], weight, slopes)
        h = act(gate) if up is None else act(gate) * up
        if weight is None:
            return h
        y = F.linear(h, weight, bias)  # autocast, where it is on, acts here as in nn.Linear
        ctx.compute_dtype = y.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        packed, (weight, slopes) = _kept(ctx)
        dw = db = None
        with torch.autocast(autocast_type(dy.device), enabled=False):
            dh = dy
            if weight is not None:
                dh = (dy @ weight.to(ctx.compute_dtype)).to(packed[0].dtype)
            dgate, dup, h, dslopes = _gradients(dh, packed, ctx.act, ctx.kind, ctx.shape, slopes)
            if weight is not None and ctx.needs_input_grad[2]:
                h2d = h.to(ctx.compute_dtype).flatten(0, -2)
                dw = (dy.flatten(0, -2).t() @ h2d).to(weight.dtype)
            if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
                db = dy.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dgate, dup, dw, db, dslopes, None, None, None


def _gradients(
    dh: Tensor,
    packed: list[Packed],
    act: Callable[[Tensor], Tensor],
    kind: ActivationKind,
    shape: torch.Size,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """``(dgate, dup, h, dslopes)`` for ``h = act(gate) * up``; ``up`` and ``dup`` may be missing, slopes are xIELU's."""
    if dh.is_cuda and len(packed) == 2 and kind in ("silu", "gelu") and packed[0].fmt.name != "int4":
        from foundry_fp8.kernels.activations import gated_backward

        dgate, dup, h = gated_backward(dh.reshape(-1), packed[0], packed[1], kind)
        return dgate.view(shape), dup.view(shape), h.view(shape), None
    gate, *rest = (unpack(p).view(shape) for p in packed)
    activated = act(gate)
    if slopes is not None:
        dgate, dslopes = _xielu_backward(dh, gate, slopes)
        return dgate, None, activated, dslopes
    if not rest:
        return _activation_backward(dh, gate, kind), None, activated, None
    return _activation_backward(dh * rest[0], gate, kind), dh * activated, activated * rest[0], None


def _activation_backward(dh: Tensor, x: Tensor, kind: ActivationKind) -> Tensor:
    """``dh * act'(x)``."""
    if kind == "silu":
        return torch.ops.aten.silu_backward(dh, x)
    return torch.ops.aten.gelu_backward(dh, x, approximate="tanh" if kind == "gelu_tanh" else "none")


def _xielu_backward(dh: Tensor, x: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """``dh * f'(x)``, and the gradient of ``slopes = (ap, an)``, float32, of :class:`~foundry_fp8.models.fog.feedforward.XIELU`::

        x > 0:   f' = 2 ap x + 1/2          df/dap = x^2
        x <= 0:  f' = an expm1(x) + 1/2     df/dan = expm1(x) - x       expm1 at min(x, -1e-6)

    Autograd of the clamp has ``1/2 - an`` between -1e-6 and 0, a jump that an input rounded to 0 would fall into.
    """
    if dh.is_cuda:
        from foundry_fp8.kernels.gated import activation_backward
        from foundry_fp8.kernels.producers import Producer

        source = Producer.activation("xielu", x.reshape(-1, x.shape[-1]), alpha=slopes)
        dx, _, dslopes = activation_backward(dh.reshape(-1, x.shape[-1]), source)
        assert dslopes is not None
        return dx.view(x.shape), dslopes
    dtype, dh, x = x.dtype, dh.float(), x.float()
    ap, an = slopes.unbind()
    positive = x > 0
    bend = torch.expm1(x.clamp(max=-1e-6))
    dx = dh * torch.where(positive, 2.0 * ap * x, an * bend).add_(0.5)
    dap = torch.where(positive, dh * x.square(), 0.0).sum()
    dan = torch.where(positive, 0.0, dh * (bend - x)).sum()
    return dx.to(dtype), torch.stack((dap, dan))


class _PackedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Callable[[Tensor], Tensor],
        eps: float,
        centred: bool,
        fmt: PackFormat,
        gain: float,
    ) -> Tensor:
        y = norm(x)
        packed, mean, rstd = _pack_norm_input(x.reshape(-1, x.shape[-1]), fmt, eps, centred)
        ctx.shape, ctx.gain, ctx.bias_dtype = x.shape, gain, None if bias is None else bias.dtype
        _keep(ctx, [packed], rstd, mean, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (packed,), (rstd, mean, weight) = _kept(ctx)
        assert rstd is not None
        with torch.autocast(autocast_type(dy.device), enabled=False):
            dx, dw, db = _norm_gradients(dy.reshape(-1, dy.shape[-1]), packed, rstd, mean, weight)
            if ctx.gain != 1.0:
                dx *= ctx.gain
        return (
            dx.view(ctx.shape),
            None if weight is None else dw.to(weight.dtype),
            None if ctx.bias_dtype is None else db.to(ctx.bias_dtype),
            *(None,) * 5,
        )


def _norm_kernels(x: Tensor, fmt: PackFormat) -> bool:
    """Whether the Triton kernels take the norm of ``x`` ``[R, C]``."""
    if not x.is_cuda or fmt.name == "int4":
        return False
    from foundry_fp8.kernels.norms import MAX_COLUMNS

    return x.shape[1] <= MAX_COLUMNS


def _pack_norm_input(
    x: Tensor, fmt: PackFormat, eps: float, centred: bool
) -> tuple[Packed, Tensor | None, Tensor]:
    """``x`` ``[R, C]`` packed, its mean (``None`` unless centred) and reciprocal root, float32 ``[R]``."""
    if _norm_kernels(x, fmt):
        from foundry_fp8.kernels.packed_norms import pack_norm_input

        return pack_norm_input(x, fmt.within(x.shape[1]), eps, centered=centred)
    # The backward of a norm that computes in bfloat16 uses its statistics too; float32 ones are closer to the truth.
    x32 = x.float()
    mean = x32.mean(1) if centred else None
    variance = (x32 if mean is None else x32 - mean[:, None]).square().mean(1)
    return pack(x, fmt), mean, torch.rsqrt(variance + eps)


def _norm_gradients(
    dy: Tensor, packed: Packed, rstd: Tensor, mean: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``dx`` in the packed dtype, and the float32 gradients of weight and bias; ``dy`` is ``[R, C]``."""
    if _norm_kernels(dy, packed.fmt):
        from foundry_fp8.kernels.norms import norm_backward

        return norm_backward(dy, packed, rstd, weight, mean=mean)
    dy, x = dy.float(), unpack(packed).view(dy.shape).float()
    normed = (x if mean is None else x.sub_(mean[:, None])).mul(rstd[:, None])
    dnormed = dy if weight is None else dy * weight.float()
    dx = dnormed - normed * (dnormed * normed).mean(1, keepdim=True)
    if mean is not None:
        dx -= dnormed.mean(1, keepdim=True)
    return dx.mul_(rstd[:, None]).to(packed.dtype), (dy * normed).sum(0), dy.sum(0)
