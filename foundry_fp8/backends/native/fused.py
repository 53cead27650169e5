"""A norm or an activation fused into the quantisation of the linear that reads it.

Unfused, a norm writes its output in high precision and the linear reads it back to quantise it. Here the norm's or
activation's value goes from registers to FP8, in both layouts, and is never in memory in high precision, neither for the
GEMM nor for backward. Results are those of the unfused modules: the value is rounded to its dtype before it is quantised.

For models whose code has the norm or activation and its linear in one place:

    y = norm_linear(self.up_proj, x, self.norm)
    y = activation_linear(self.down_proj, gate, "silu", up=up)

They call the linear's GEMMs, not the module: forward hooks on the linear do not run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.backends.native.inputs import LinearCall, checked_dtype
from foundry_fp8.backends.native.plan import Layout
from foundry_fp8.compat.fresh_view import fresh_view
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.deferred_norm import DeferredNorm
from foundry_fp8.layers.linear import FP8Linear

__all__ = ["activation_linear", "deferred_norm_linear", "norm_linear"]

NORM = 1
ACTIVATION_CODES = {"silu": 2, "gelu": 3, "gelu_tanh": 4, "xielu": 5}
"""As in :data:`foundry_fp8.kernels.producers.ACTIVATIONS`, which needs Triton to be imported."""


def norm_linear(linear: FP8Linear, x: Tensor, norm: nn.Module) -> Tensor:
    """``linear(norm(x))`` without writing ``norm(x)``.

    Args:
        linear: A converted linear on the native backend, with wgrad in FP8.
        x: ``[..., in_features]``, hp.
        norm: An ``nn.RMSNorm`` or ``nn.LayerNorm`` (or subclass with their attributes) over the last dimension.

    Returns:
        ``[..., out_features]``. While ``linear`` runs in high precision, or a monitor wants to see what
        it reads: the unfused expression.

    Raises:
        TypeError: A norm or a linear that this cannot fuse.
    """
    # A tuple, because Dynamo of torch 2.7 does not trace isinstance of a union.
    if not isinstance(norm, (nn.RMSNorm, nn.LayerNorm)) or tuple(norm.normalized_shape) != (x.shape[-1],):
        raise TypeError(
            f"{linear.fqn}: cannot fuse {norm}; it takes nn.RMSNorm and nn.LayerNorm over {x.shape[-1]} features."
        )
    _check_linear(linear)
    if not linear.runs_fp8 or linear.probe is not None or x.numel() == 0:
        plain: Tensor = linear(norm(x))
        return plain
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    bias = getattr(norm, "bias", None)
    producer = _Producer(kind=NORM, eps=eps, centered=isinstance(norm, nn.LayerNorm))
    return linear.recorded(
        x, lambda x: _run(linear, x, producer, norm_weight=norm.weight, norm_bias=bias), linear.weight
    )


def deferred_norm_linear(linear: FP8Linear, x: Tensor, norm: DeferredNorm) -> Tensor:
    """``linear`` of a norm that passed its input on (``fuse: true``), from the module's own forward, which records.

    A low-precision norm casts its parameters to the compute dtype; the others are fused only where they have it already.
    """
    dtype = compute_dtype(x)
    eps: float | None = norm.eps  # type: ignore[assignment]
    centered = norm.normalization == "LayerNorm"
    bias = norm.bias if centered else None
    eps = torch.finfo(dtype).eps if eps is None else eps
    return _run(
        linear,
        x,
        _Producer(kind=NORM, eps=eps, centered=centered),
        norm_weight=norm.weight.to(dtype),
        norm_bias=None if bias is None else bias.to(dtype),
    )


def activation_linear(
    linear: FP8Linear, x: Tensor, activation: str, *, up: Tensor | None = None, alpha: Tensor | None = None
) -> Tensor:
    """``linear(activation(x))``, or ``linear(activation(x) * up)``, without writing what the linear reads.

    Args:
        linear: A converted linear on the native backend, with wgrad in FP8.
        x: ``[..., in_features]``, hp: the activation's input, the gate of a gated one.
        activation: ``silu`` (with ``up``: SwiGLU), ``gelu`` (GeGLU), ``gelu_tanh`` or ``xielu``.
        up: The shape and dtype of ``x``.
        alpha: xIELU's effective slopes ``(alpha_p, alpha_n)``, float32 ``[2]``; gets a gradient.

    Returns:
        ``[..., out_features]``. While ``linear`` runs in high precision, or a monitor wants to see what
        it reads: the unfused expression.

    Raises:
        ValueError: An unknown activation.
        TypeError: A linear that this cannot fuse.
    """
    if activation not in ACTIVATION_CODES:
        raise ValueError(
            f"{linear.fqn}: activation {activation!r} is not one of {', '.join(ACTIVATION_CODES)}."
        )
    _check_linear(linear)
    if not linear.runs_fp8 or linear.probe is not None or x.numel() == 0:
        plain: Tensor = linear(_unfused_activation(x, activation, up, alpha))
        return plain
    producer = _Producer(kind=ACTIVATION_CODES[activation])
    return linear.recorded(x, lambda x: _run(linear, x, producer, up=up, alpha=alpha), linear.weight)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Producer:
    """What makes x: a norm (``NORM``) or an activation, by its code."""

    kind: int
    eps: float = 0.0
    centered: bool = False


class _ProducedLinear(torch.autograd.Function):
    """:class:`~foundry_fp8.backends.native.linear.NativeLinear` of a produced x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        alpha: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        cached: tuple[Layout, Layout, Tensor] | None,
        call: LinearCall,
        producer: _Producer,
    ) -> Tensor:
        from foundry_fp8.backends.native import ops  # Triton is imported there, not before
        from foundry_fp8.backends.native.linear import fprop
        from foundry_fp8.backends.native.operand import Source

        mean = rstd = None
        if producer.kind == NORM:
            mean, rstd = ops.norm_statistics(x, producer.eps, producer.centered)
            mean = mean if producer.centered else None
        source = Source(x, up, mean, rstd, norm_weight, norm_bias, alpha, producer.kind)
        y, saved = fprop(source, weight, bias, call, cached=cached, keep_x=ctx.needs_input_grad[5])
        ctx.save_for_backward(x, up, mean, rstd, norm_weight, norm_bias, alpha, *saved)
        ctx.call, ctx.kind = call, producer.kind
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from foundry_fp8.backends.native import ops
        from foundry_fp8.backends.native.linear import dgrad_and_wgrad

        x, up, mean, rstd, norm_weight, norm_bias, alpha, *saved = ctx.saved_tensors
        needs = (any(ctx.needs_input_grad[:5]), ctx.needs_input_grad[5], ctx.needs_input_grad[6])
        produced, dw, db = dgrad_and_wgrad(dy, saved, ctx.call, x.dtype, needs=needs)
        dx = dup = dnorm_weight = dnorm_bias = dalpha = None
        if produced is not None and ctx.kind == NORM:
            dx, dnorm_weight, dnorm_bias = ops.norm_backward(produced, x, rstd, norm_weight, mean)
            dnorm_weight = None if norm_weight is None else dnorm_weight.to(norm_weight.dtype)
            dnorm_bias = None if norm_bias is None else dnorm_bias.to(norm_bias.dtype)
        elif produced is not None:
            dx, dup, dalpha = ops.activation_backward(produced, x, up, alpha, ctx.kind)
            dup = None if up is None else dup
            dalpha = None if alpha is None else dalpha
        db = None if db is None else db.to(ctx.bias_dtype)
        return dx, dup, dnorm_weight, dnorm_bias, dalpha, dw, db, None, None, None


def _run(
    linear: FP8Linear,
    x: Tensor,
    producer: _Producer,
    *,
    up: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    alpha: Tensor | None = None,
) -> Tensor:
    backend: Any = linear.backend
    weight = linear.matrix.contiguous()
    dtype, call = checked_dtype(linear, x, weight), LinearCall.of(linear)
    with torch.autocast(x.device.type, enabled=False):
        y: Tensor = _ProducedLinear.apply(  # type: ignore[no-untyped-call]
            x.to(dtype).reshape(-1, x.shape[-1]),
            None if up is None else up.to(dtype).reshape(-1, x.shape[-1]),
            norm_weight,
            norm_bias,
            alpha,
            weight,
            linear.bias,
            backend.cached_weight(linear, call, dtype),
            call,
            producer,
        )
    return fresh_view(y, *x.shape[:-1], linear.out_features)


def _check_linear(linear: FP8Linear) -> None:
    if not isinstance(linear, FP8Linear) or linear.backend.name != "native":
        raise TypeError(f"{linear}: only linears converted with backend: native can be fused.")
    if linear.wgrad != "fp8":
        raise TypeError(
            f"{linear.fqn}: wgrad: high_precision reads x in high precision, which fusing never writes. "
            "Set wgrad: fp8, or leave this layer unfused."
        )


def _unfused_activation(x: Tensor, name: str, up: Tensor | None, alpha: Tensor | None) -> Tensor:
    if name == "xielu":
        from foundry_fp8.kernels.producers import xielu_reference

        assert alpha is not None
        y = xielu_reference(x.float(), alpha).to(x.dtype)
    elif name == "silu":
        y = torch.nn.functional.silu(x)
    else:
        y = torch.nn.functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    return y if up is None else y * up
