"""A norm or an activation computed where the linear behind it quantises its input, and a whole MLP as one node.

Unfused, a norm writes its output in high precision and the linear reads it back to quantise it. Here it goes from registers to
FP8 in both layouts, and is in memory neither for the GEMM nor for backward. In an MLP the gradients of gate and up, which the
activation's derivative makes, go to FP8 likewise. Each value is rounded to its dtype before it is quantised, as the module's own
would be: what differs from the unfused modules is the last bit of an elementary function or of a row's sum.

``algorithms.fp8.fuse`` puts these into a model.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

from foundry_fp8.backends.native.inputs import LinearCall, checked_dtype, is_alone, shared_input
from foundry_fp8.backends.native.late import late
from foundry_fp8.backends.native.source import Source
from foundry_fp8.compat.autograd import apply_untransformed
from foundry_fp8.compat.fresh_view import in_shape
from foundry_fp8.compat.module_hooks import watched
from foundry_fp8.compat.wrapper_tensor import without_function_override
from foundry_fp8.kernels.launch import HP_DTYPES, interpreting
from foundry_fp8.kernels.sources import ACTIVATIONS, GRADIENT, GRADIENT_OF_UP, NORM, ROUNDED_NORM
from foundry_fp8.layers.autocast import compute_dtype, without_autocast
from foundry_fp8.layers.frozen_weight import in_dtype
from foundry_fp8.layers.produced import Produced, in_memory
from foundry_fp8.model_structure.forms import MLPForm, NormForm

__all__ = ["mlp_forward", "norm_forward"]

_readers: weakref.WeakKeyDictionary[nn.Module, Sequence[weakref.ref[Any]]] = weakref.WeakKeyDictionary()
"""Which linears read a norm's output the last time."""


def norm_forward(cls: Any, form: NormForm) -> Callable[..., Tensor]:
    """The forward of a norm of the class ``cls`` whose output is made by who reads it."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        x, *others = *args, *kwargs.values()  # a gate
        x = in_memory(x)
        # A unit of FSDP2's own frees its weight before the output is read.
        if others or not (self.training and _kernels_run(x)) or isinstance(self, FSDPModule):
            return _unfused(cls, self, args, kwargs)
        dtype, parts = compute_dtype(x), [self.weight, getattr(self, "bias", None)]
        if form.low_precision:
            x, parts = x.to(dtype), [None if part is None else part.to(dtype) for part in parts]
        there = [part for part in parts if part is not None]
        alike = all(part.dtype == dtype and type(part) in (Tensor, nn.Parameter) for part in there)
        if x.dtype != dtype or not alike or x.shape[-1] != parts[0].numel():
            return _unfused(cls, self, args, kwargs)
        with without_autocast(x.device.type):
            y: Produced = _Norm.apply(x, *parts, form)  # type: ignore[no-untyped-call]
        y.expected, _readers[self] = _readers.get(self, ()), y.readers
        return y

    return forward


def mlp_forward(cls: Any, form: MLPForm) -> Callable[..., Tensor]:
    """The forward of an MLP of the class ``cls``: one node, or node by node where somebody looks in between."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        x, *others = *args, *kwargs.values()
        given = x.source.x if type(x) is Produced else x
        if others or not (self.training and _kernels_run(given) and _as_shown(self, form)):
            return _unfused(cls, self, args, kwargs)
        members = [self._modules[name] for name in form.linears]
        fits = given.shape[-1] == members[0].in_features and given.device == members[0].weight.device
        if fits and all(map(is_alone, members)):
            with without_function_override():  # type: ignore[no-untyped-call]
                return _mlp(x, members, form)
        gate, *up = (member(x) for member in members[:-1])
        return members[-1](_activated(gate, up[0] if up else None, form.activation))  # type: ignore[no-any-return]

    return forward


def _unfused(cls: Any, module: nn.Module, args: Any, kwargs: Any) -> Tensor:
    named = {name: in_memory(x) for name, x in kwargs.items()}
    return cls.forward(module, *map(in_memory, args), **named)  # type: ignore[no-any-return]


def _as_shown(module: nn.Module, form: MLPForm) -> bool:
    """Whether an MLP's children are those whose form was found, its activation is shown to nobody, and nothing is dropped."""
    others = [
        child for name, child in module._modules.items() if name not in form.linears and child is not None
    ]
    alike = tuple(map(type, others)) == form.others and all(name in module._modules for name in form.linears)
    return alike and not any(watched(child) or getattr(child, "p", 0.0) for child in others)


def _kernels_run(x: Tensor) -> bool:
    there = x.is_cuda or (x.device.type == "cpu" and interpreting())
    memory = type(x) in (Tensor, Produced) and x.dim() > 0 and x.numel() > 0  # not of a plan's fake tensors
    return there and memory and x.dtype in HP_DTYPES and not torch.compiler.is_compiling()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: NormForm) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        eps = torch.finfo(torch.float32).eps if form.eps is None else form.eps
        mean, rstd = late().ops.norm_statistics(rows, eps, form.centred)
        mean = mean if form.centred else None
        gain = weight.float() + 1 if form.plus_one else weight
        kind = ROUNDED_NORM if form.rounded else NORM
        ctx.save_for_backward(x, gain, mean, rstd)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return Produced(x.shape, Source(rows, None, mean, rstd, gain, bias, kind), late().ops.produce)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, mean, rstd = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        weight_dtype, bias_dtype = ctx.dtypes
        dx, dweight, dbias = late().ops.norm_backward(
            dy.reshape(rows.shape), rows, rstd, gain, mean, weight_dtype
        )
        if bias_dtype is not None and mean is None:
            dbias = dy.float().reshape(rows.shape).sum(0)
        return dx.view(x.shape), dweight, None if bias_dtype is None else dbias.to(bias_dtype), None


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor | None, code: int) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x, up)
        ctx.code = code
        source = Source(rows, None if up is None else up.reshape(rows.shape), kind=code)
        return Produced(x.shape, source, late().ops.produce)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, up = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        up_rows = None if up is None else up.reshape(rows.shape)
        dx, dup = late().ops.activation_backward(dy.reshape(rows.shape), rows, up_rows, ctx.code)
        return dx.view(x.shape), None if up is None else dup.view(x.shape), None


def _activated(x: Tensor, up: Tensor | None, activation: str) -> Tensor:
    dtype = compute_dtype(x)
    with without_autocast(x.device.type):
        given = x.to(dtype), None if up is None else up.to(dtype), ACTIVATIONS[activation]
        return _Activation.apply(*given)  # type: ignore[no-any-return,no-untyped-call]


class _MLP(torch.autograd.Function):
    """``down(activation(gate(x)) [* up(x)])``; of the first linears, that of the gate is the first."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        code: int,
        calls: Sequence[LinearCall],
        cached: Sequence[Any],
        keeps: tuple[bool, bool],
        *tensors: Any,
    ) -> Tensor:
        fprop, made = late().linear.fprop, {}
        if isinstance(x, Produced):
            source, made = x.source, x.made
        else:
            source = Source(x.reshape(-1, x.shape[-1]))
        keep_w, grad = keeps  # as NativeLinear's
        count, needs = len(calls), [needed and grad for needed in ctx.needs_input_grad[5:]]
        weights, biases = tensors[:count], tensors[count:]
        keep_w &= ctx.needs_input_grad[0]
        inner: list[Tensor] = []
        saved: list[Sequence[Tensor | None]] = []
        ahead = None
        if count == 3 and cached[1] is None and calls[1].plan is calls[0].plan:
            ahead = late().ahead.Ahead(weights[1:2], [calls[1].w])
        for i, (weight, bias, call) in enumerate(zip(weights[:-1], biases, calls, strict=False)):
            options = {"keep_x": needs[i], "keep_w": keep_w, "shared": shared_input(made, call)}
            known = ahead.made[0] if i and ahead is not None and ahead.made else cached[i]
            y, kept = fprop(source, weight, bias, call, cached=known, ahead=None if i else ahead, **options)
            inner.append(y)
            saved.append(kept)
        gate, up = inner[0], inner[1] if len(inner) > 1 else None
        activated = Source(gate, up, kind=code)
        keep_x = needs[count - 1]
        known, call = cached[-1], calls[-1]
        y, kept = fprop(activated, weights[-1], biases[-1], call, keep_x=keep_x, keep_w=keep_w, cached=known)
        saved.append(kept)
        ctx.kept_w = [kept[4:] for kept in saved] if keep_w else None
        saved = [(*kept[:4], None, None) for kept in saved] if keep_w else saved
        ctx.save_for_backward(gate, up, *itertools.chain(*saved))
        ctx.code, ctx.calls, ctx.shape, ctx.calls_at_backward = code, calls, x.shape, None
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        return y if x.dim() == 2 else in_shape(y, *x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.calls_at_backward()
        saved_by_one, dgrad_and_wgrad = late().linear.SAVED, late().linear.dgrad_and_wgrad
        gate, up, *saved = ctx.saved_tensors
        count, dtype = len(ctx.calls), gate.dtype
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        kept = [saved[saved_by_one * i : saved_by_one * (i + 1)] for i in range(count)]
        if ctx.kept_w is not None:
            for of_one, kept_w in zip(kept, ctx.kept_w, strict=True):
                of_one[4:] = kept_w
            ctx.kept_w = None
        below = needs_x or any(needs[: count - 1]) or any(needs[count:-1])
        dws: list[Tensor | None] = [None] * count
        dbs: list[Tensor | None] = [None] * count
        wanted = below, needs[count - 1], needs[-1]
        rows = dy.reshape(-1, dy.shape[-1])
        inner, dws[-1], dbs[-1] = dgrad_and_wgrad(rows, kept[-1], ctx.calls[-1], dtype, needs=wanted)
        dx: Tensor | None = None
        for i in reversed(range(count - 1)) if below else ():  # in the order in which autograd adds up
            kind = ctx.code + (GRADIENT_OF_UP if i else GRADIENT)
            source = Source(gate, None if i else up, weight=inner, kind=kind)
            wanted = needs_x, needs[i], needs[count + i]
            one, dws[i], dbs[i] = dgrad_and_wgrad(source, kept[i], ctx.calls[i], dtype, needs=wanted)
            dx = one if dx is None or one is None else dx.add_(one)
        dbs = [None if db is None else db.to(to) for db, to in zip(dbs, ctx.bias_dtypes, strict=True)]
        return None if dx is None else dx.view(ctx.shape), None, None, None, None, *dws, *dbs


def _mlp(x: Tensor, members: Sequence[Any], form: MLPForm) -> Tensor:
    if type(x) is Produced and not (x.unread and x.source.x.dtype == compute_dtype(x.source.x)):
        x = x.plain()
    if type(x) is not Produced:
        x = in_dtype(x, compute_dtype(x))
    rows = x.source.x if type(x) is Produced else x
    weights, first = [m.matrix.contiguous() for m in members], members[:-1]
    dtype = checked_dtype(members[0], rows, weights[0])
    tokens, reaches = rows.numel() // rows.shape[-1], x.requires_grad
    below = reaches or any(p is not None and p.requires_grad for m in first for p in m._parameters.values())
    records = [m.enter(rows, m.weight, tokens, reaches if m in first else below) for m in members]
    gate, up = members[0].slots, members[-2].slots
    alike = members[0].recipe is members[-2].recipe
    if alike and not (
        gate is None or up is None or (rows.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        up["x"].state.join(up["x"], gate["x"])  # they quantise one tensor
    with without_autocast(x.device.type):
        calls = [LinearCall.of(m) for m in members]
        cached = [m.backend.cached_weight(m, call, dtype) for m, call in zip(members, calls, strict=True)]
        tensors = *weights, *(m.bias for m in members)
        keeps = members[0].backend.keeps_weight(x), torch.is_grad_enabled()
        y: Tensor = apply_untransformed(_MLP, x, ACTIVATIONS[form.activation], calls, cached, keeps, *tensors)
    if y.grad_fn is not None:
        y.grad_fn.calls_at_backward = lambda: [record(None) for record in records]  # type: ignore[attr-defined]
    return y
