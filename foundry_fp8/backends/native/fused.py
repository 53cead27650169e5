"""A norm or an activation computed where the linear behind it quantises its input, and a whole MLP as one node.

Unfused, a norm writes its output in high precision and the linear reads it back to quantise it. Here it goes from registers to
FP8 in both layouts, and is in memory neither for the GEMM nor for backward. In an MLP the gradients of gate and up, which the
activation's derivative makes, go to FP8 likewise. Each value is rounded to its dtype before it is quantised, as the module's own
would be: what differs from the unfused modules is the last bit of an elementary function or of a row's sum. What is fused and
what is read in between by somebody else are equal to the bit.

``algorithms.fp8.fuse`` puts these into a model. For models whose code has both in one place:

    y = norm_linear(self.up_proj, x, self.norm)
    y = activation_linear(self.down_proj, gate, "silu", up=up)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foundry_fp8.backends.native.inputs import LinearCall, checked_dtype, shared_input
from foundry_fp8.compat.fresh_view import in_shape
from foundry_fp8.kernels.launch import interpreting
from foundry_fp8.layers.autocast import compute_dtype, without_autocast
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.produced import Produced, in_memory
from foundry_fp8.layers.shared_inputs import QuantizedInput
from foundry_fp8.model_structure.forms import MLPForm, NormForm, norm_form

__all__ = ["activation_linear", "mlp_forward", "norm_forward", "norm_linear"]

ACTIVATION_CODES = {"silu": 2, "gelu": 3, "gelu_tanh": 4, "xielu": 5}
"""As in :data:`foundry_fp8.kernels.producers.ACTIVATIONS`, which needs Triton to be imported, like what follows."""
NORM, ROUNDED_NORM, GRADIENT, GRADIENT_OF_UP = 1, 6, 8, 16


def norm_forward(cls: Any, form: NormForm) -> Callable[..., Tensor]:
    """The forward of a norm of the class ``cls`` whose output is made by who reads it."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = in_memory(x)
        if not (self.training and _kernels_run(x)):
            y: Tensor = cls.forward(self, x)
            return y
        dtype, weight, bias = compute_dtype(x), self.weight, getattr(self, "bias", None)
        if form.low_precision:
            x, weight, bias = (None if t is None else t.to(dtype) for t in (x, weight, bias))
        same = x.dtype == dtype and all(type(t) is not nn.Parameter or t.dtype == dtype for t in (weight, bias))
        plain = all(t is None or type(t) in (Tensor, nn.Parameter) for t in (weight, bias))
        if not same or not plain or x.shape[-1] != weight.numel():
            return cls.forward(self, x)  # type: ignore[no-any-return]
        with without_autocast(x.device.type):
            return _Norm.apply(x, weight, bias, form)  # type: ignore[no-any-return,no-untyped-call]

    return forward


def mlp_forward(cls: Any, form: MLPForm) -> Callable[..., Tensor]:
    """The forward of an MLP of the class ``cls``: one node, or node by node where somebody looks in between."""

    def forward(self: Any, x: Tensor) -> Tensor:
        members = [self._modules[name] for name in form.linears]
        if not (self.training and _kernels_run(x)):
            y: Tensor = cls.forward(self, x)
            return y
        if all(map(_is_alone, members)) and not _watched(self._modules.get(form.activation_module)):
            return _mlp(x, members, form)
        gate, *up = (in_memory(member(x)) for member in members[:-1])
        return members[-1](_activated(gate, up[0] if up else None, form.activation))  # type: ignore[no-any-return]

    return forward


def norm_linear(linear: FP8Linear, x: Tensor, norm: nn.Module) -> Tensor:
    """``linear(norm(x))`` without writing ``norm(x)``.

    Args:
        linear: A converted linear on the native backend.
        x: ``[..., in_features]``, hp.
        norm: A norm over the last dimension that :func:`~foundry_fp8.model_structure.forms.norm_form` knows.

    Returns:
        ``[..., out_features]``.

    Raises:
        TypeError: A norm or a linear that this cannot fuse.
    """
    form = norm_form(norm)
    if form is None or norm.weight.numel() != x.shape[-1]:
        raise TypeError(f"{linear.fqn}: cannot fuse {norm}; it takes RMSNorms and LayerNorms over {x.shape[-1]} features.")
    _check_linear(linear)
    y: Tensor = linear(norm_forward(type(norm), form)(norm, x) if linear.runs_fp8 else norm(x))
    return y


def activation_linear(
    linear: FP8Linear, x: Tensor, activation: str, *, up: Tensor | None = None, alpha: Tensor | None = None
) -> Tensor:
    """``linear(activation(x))``, or ``linear(activation(x) * up)``, without writing what the linear reads.

    Args:
        linear: A converted linear on the native backend.
        x: ``[..., in_features]``, hp: the activation's input, the gate of a gated one.
        activation: ``silu`` (with ``up``: SwiGLU), ``gelu`` (GeGLU), ``gelu_tanh`` or ``xielu``.
        up: The shape and dtype of ``x``.
        alpha: xIELU's effective slopes ``(alpha_p, alpha_n)``, float32 ``[2]``; gets a gradient.

    Returns:
        ``[..., out_features]``.

    Raises:
        ValueError: An unknown activation.
        TypeError: A linear that this cannot fuse.
    """
    if activation not in ACTIVATION_CODES:
        raise ValueError(
            f"{linear.fqn}: activation {activation!r} is not one of {', '.join(ACTIVATION_CODES)}."
        )
    _check_linear(linear)
    fused = linear.runs_fp8 and _kernels_run(x)
    y: Tensor = linear((_activated if fused else _unfused_activation)(x, up, activation, alpha))
    return y


def _check_linear(linear: FP8Linear) -> None:
    if not isinstance(linear, FP8Linear) or linear.backend.name != "native":
        raise TypeError(f"{linear}: only linears converted with backend: native can be fused.")


def _kernels_run(x: Tensor) -> bool:
    return x.numel() > 0 and (x.is_cuda or interpreting()) and not torch.compiler.is_compiling()


def _watched(module: nn.Module | None) -> bool:
    """Whether hooks want to see what goes in or out of ``module``; those of the first batch's trace look at linears alone."""
    if module is None:
        return False
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(backward) or any(not getattr(hook, "reads_nothing", False) for hook in hooks)


def _is_alone(member: nn.Module) -> bool:
    """Whether a linear can be computed as a part of a node: in FP8, seen by nobody, with a weight of its own."""
    return (
        isinstance(member, FP8Linear)
        and member.runs_fp8
        and member.wgrad == "fp8"
        and member.probe is None
        and "forward" not in vars(member)
        and type(member.weight) in (nn.Parameter, Tensor)
        and not _watched(member)
    )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: NormForm) -> Tensor:
        from foundry_fp8.backends.native import ops  # Triton is imported there, not before
        from foundry_fp8.backends.native.operand import Source

        rows = x.reshape(-1, x.shape[-1])
        eps = torch.finfo(x.dtype).eps if form.eps is None else form.eps
        mean, rstd = ops.norm_statistics(rows, eps, form.centred)
        mean = mean if form.centred else None
        gain = weight.float() + 1 if form.plus_one else weight
        kind = ROUNDED_NORM if form.rounded else NORM
        ctx.save_for_backward(x, gain, mean, rstd)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return Produced(x.shape, Source(rows, None, mean, rstd, gain, bias, None, kind), ops.produce)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from foundry_fp8.backends.native import ops

        x, gain, mean, rstd = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        dx, dweight, dbias = ops.norm_backward(dy.reshape(rows.shape), rows, rstd, gain, mean)
        weight_dtype, bias_dtype = ctx.dtypes
        if bias_dtype is not None and mean is None:
            dbias = dy.float().reshape(rows.shape).sum(0)
        return (
            dx.view(x.shape), dweight.to(weight_dtype), None if bias_dtype is None else dbias.to(bias_dtype), None,
        )  # fmt: skip


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor | None, alpha: Tensor | None, code: int) -> Tensor:
        from foundry_fp8.backends.native import ops
        from foundry_fp8.backends.native.operand import Source

        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x, up, alpha)
        ctx.code = code
        source = Source(rows, None if up is None else up.reshape(rows.shape), None, None, None, None, alpha, code)
        return Produced(x.shape, source, ops.produce)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from foundry_fp8.backends.native import ops

        x, up, alpha = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        up_rows = None if up is None else up.reshape(rows.shape)
        dx, dup, dalpha = ops.activation_backward(dy.reshape(rows.shape), rows, up_rows, alpha, ctx.code)
        dup = None if up is None else dup.view(x.shape)
        return dx.view(x.shape), dup, None if alpha is None else dalpha, None


def _activated(x: Tensor, up: Tensor | None, activation: str, alpha: Tensor | None = None) -> Tensor:
    dtype = compute_dtype(x)
    with without_autocast(x.device.type):
        given = x.to(dtype), None if up is None else up.to(dtype), alpha, ACTIVATION_CODES[activation]
        return _Activation.apply(*given)  # type: ignore[no-any-return,no-untyped-call]


class _Part(NamedTuple):
    """One linear of an MLP."""

    call: LinearCall
    cached: Any


class _MLP(torch.autograd.Function):
    """``down(activation(gate(x)) [* up(x)])``; of the first linears, that of the gate is the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, code: int, parts: Sequence[_Part], *tensors: Tensor | None) -> Tensor:
        from foundry_fp8.backends.native.linear import fprop
        from foundry_fp8.backends.native.operand import Source

        source = x.source if type(x) is Produced else Source(x.reshape(-1, x.shape[-1]))
        count = len(parts)
        weights, biases, needs = tensors[:count], tensors[count:], ctx.needs_input_grad[3 : 3 + count]
        *first, (down_call, down_cached) = parts
        inner, saved = [], []
        shared = shared_input(x, first[0].call) if type(x) is Produced else QuantizedInput()
        for (call, cached), weight, bias, keep_x in zip(first, weights, biases, needs, strict=False):
            assert weight is not None
            y, kept = fprop(source, weight, bias, call, keep_x=keep_x, cached=cached, shared=shared if call.x[0] is None else None)
            inner.append(y)
            saved += kept
        gate, up = inner[0], inner[1] if len(inner) > 1 else None
        activated = Source(gate, up, kind=code)
        y, kept = fprop(activated, weights[-1], biases[-1], down_call, keep_x=needs[-1], cached=down_cached)  # type: ignore[arg-type]
        ctx.save_for_backward(gate, up, *saved, *kept)
        ctx.code, ctx.calls, ctx.shape = code, [part.call for part in parts], x.shape
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        ctx.calls_at_backward = None
        return in_shape(y, *x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from foundry_fp8.backends.native.linear import SAVED, dgrad_and_wgrad
        from foundry_fp8.backends.native.operand import Source

        ctx.calls_at_backward()
        gate, up, *saved = ctx.saved_tensors
        count, dtype = len(ctx.calls), gate.dtype
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        kept = [saved[SAVED * i : SAVED * (i + 1)] for i in range(count)]
        below = needs_x or any(needs[: count - 1]) or any(needs[count : 2 * count - 1])
        grads: list[tuple[Tensor | None, ...]] = [()] * count
        inner, *grads[-1:] = _parts(dgrad_and_wgrad(
            Source(dy.reshape(-1, dy.shape[-1])), kept[-1], ctx.calls[-1], dtype, needs=(below, needs[count - 1], needs[-1])
        ))  # fmt: skip
        dx = None
        for i in reversed(range(count - 1)) if inner is not None else ():  # the order in which autograd adds up
            kind = ctx.code + (GRADIENT if i == 0 else GRADIENT_OF_UP)
            source = Source(gate, up if i == 0 else None, weight=inner, kind=kind)
            wanted = needs_x, needs[i], needs[count + i]
            one, *grads[i : i + 1] = _parts(dgrad_and_wgrad(source, kept[i], ctx.calls[i], dtype, needs=wanted))
            dx = one if dx is None else dx.add_(one)
        dws, dbs = [g[0] for g in grads], [g[1] for g in grads]
        dbs = [db if db is None else db.to(to) for db, to in zip(dbs, ctx.bias_dtypes, strict=True)]
        return None if dx is None else dx.view(ctx.shape), None, None, *dws, *dbs


def _parts(found: tuple[Tensor | None, ...]) -> tuple[Any, tuple[Tensor | None, ...]]:
    dx, *rest = found
    return dx, tuple(rest)


def _mlp(x: Tensor, members: Sequence[Any], form: MLPForm) -> Tensor:
    weights = [member.matrix.contiguous() for member in members]
    dtype = checked_dtype(members[0], x, weights[0])
    if type(x) is Produced and not (x.unread and x.dtype == dtype):
        x = x.plain()
    x = x if x.dtype == dtype else x.to(dtype)
    tokens = x.numel() // x.shape[-1]
    reaches = x.requires_grad or any(p.requires_grad for member in members[:-1] for p in member.parameters(recurse=False))
    records = [m.enter(x, m.weight, tokens, reaches if m is members[-1] else x.requires_grad) for m in members]
    with without_autocast(x.device.type):
        calls = [LinearCall.of(member) for member in members]
        cached = [m.backend.cached_weight(m, call, dtype) for m, call in zip(members, calls, strict=True)]
        parts = [_Part(*part) for part in zip(calls, cached, strict=True)]
        code = ACTIVATION_CODES[form.activation]
        y: Tensor = _MLP.apply(x, code, parts, *weights, *(m.bias for m in members))  # type: ignore[no-untyped-call]
    if y.grad_fn is not None:
        y.grad_fn.calls_at_backward = lambda: [record(None) for record in records]  # type: ignore[attr-defined]
    return y


def _unfused_activation(x: Tensor, up: Tensor | None, name: str, alpha: Tensor | None) -> Tensor:
    if name == "xielu":
        from foundry_fp8.kernels.producers import xielu_reference

        assert alpha is not None
        y = xielu_reference(x.float(), alpha).to(x.dtype)
    elif name == "silu":
        y = torch.nn.functional.silu(x)
    else:
        y = torch.nn.functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    return y if up is None else y * up
