"""The emulated backend: fprop, dgrad and wgrad of an FP8 linear in one autograd function."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_fp8.backends.emulated.dense import readable
from foundry_fp8.backends.emulated.gemm import Sums, scaled_mm
from foundry_fp8.backends.emulated.quantizers import quantize_operand
from foundry_fp8.compat.fresh_view import fresh_view
from foundry_fp8.layers.attention import AttentionBackend
from foundry_fp8.layers.autocast import autocast_type, compute_dtype
from foundry_fp8.layers.backend import Availability, Backend
from foundry_fp8.layers.frozen_weight import in_high_precision
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from foundry_fp8.layers.grouped_linear import FP8GroupedLinear, by_expert
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.shared_inputs import QuantizedInput
from foundry_fp8.numerics.quantize import Quantized, with_amax
from foundry_fp8.numerics.recipes import Gemm, Operand, Recipe

__all__ = ["EmulatedBackend"]


class EmulatedBackend(Backend):
    """Exact FP8 operands and products, float32 sums; runs every recipe on every device."""

    name: ClassVar[str] = "emulated"
    lacks: ClassVar[Mapping[str, str]] = {name: Backend.lacks[name] for name in ("cache_weights", "fuse")}

    def availability(self, recipe: Recipe, device: torch.device) -> Availability:
        """Always available, except for mxfp8 and nvfp4 with ``accumulation: hopper``."""
        if self.options.accumulation == "hopper" and not recipe.runs_on_hopper:
            return Availability(
                False,
                f"accumulation: hopper is that of GPUs which cannot run {recipe.name}",
                "Use accumulation: float32, or recipe: block or current.",
            )
        return Availability(True)

    @torch.compiler.disable
    def linear(self, module: FP8Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`Backend.linear`. Saves the FP8 input for backward, not the high-precision one."""
        dtype = compute_dtype(x)
        if x.numel() == 0:
            return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        recording = _begin_pass(module)
        x2d, shared = x.to(dtype).reshape(-1, x.shape[-1]), self._shared(module, x, dtype)
        with torch.autocast(autocast_type(x.device), enabled=False):
            y: Tensor = _EmulatedLinear.apply(  # type: ignore[no-untyped-call]
                x2d, weight, bias, module, recording, shared
            )
        return fresh_view(y, *x.shape[:-1], len(weight))

    def attention(self) -> AttentionBackend:
        """See :meth:`Backend.attention`."""
        from foundry_fp8.backends.emulated.attention import EmulatedAttention

        return EmulatedAttention()

    def experts_reason(self) -> str | None:
        """It runs them."""
        return None

    @torch.compiler.disable
    def grouped_linear(
        self, layer: FP8GroupedLinear, x: Tensor, weights: Tensor, sizes: Sequence[int]
    ) -> Tensor:
        """See :meth:`Backend.grouped_linear`: each expert's product as a linear of its own would compute it."""
        x = x.to(compute_dtype(x))
        recording = _begin_pass(layer)

        def product(x: Tensor, weight: Tensor) -> Tensor:
            y: Tensor = _EmulatedLinear.apply(x, weight, None, layer, recording, QuantizedInput())  # type: ignore[no-untyped-call]
            return y

        with torch.autocast(autocast_type(x.device), enabled=False):
            return by_expert(product, x, weights, sizes)

    def _shared(self, module: FP8Linear, x: Tensor, dtype: torch.dtype) -> QuantizedInput:
        key: tuple[Hashable, ...] = (module.recipe, dtype)
        if module.recipe is not None and module.recipe.uses_history and module.slots is not None:
            scale = module.slots["x"].scale  # each linear has its own; a None in the key means: do not share
            key = (*key, float(scale) if readable(scale) else None)
        return self.inputs.of(x, *key)


def _begin_pass(layer: FP8GemmLayer) -> tuple[Operand, ...]:
    """What this pass records; one that trains is counted, but for a recompute of one that was."""
    recording = layer.recording()
    layer.passes += "x" in recording
    return recording


class _EmulatedLinear(torch.autograd.Function):
    """``y = x @ w.T + b`` with the GEMMs of :mod:`foundry_fp8.layers.backend`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        module: FP8GemmLayer,
        recording: tuple[Operand, ...],
        shared: QuantizedInput,
    ) -> Tensor:
        ctx.module, ctx.recipe, ctx.recording = module, module.recipe, recording
        ctx.fprop, ctx.dgrad, ctx.wgrad = module.fprop, module.dgrad, module.wgrad
        ctx.number = module.passes
        ctx.scales = {} if module.slots is None else {name: slot.scale for name, slot in module.slots.items()}
        qx = _quantize(ctx, x, "x", along=1, shared=shared)
        hp_weight = in_high_precision(weight, x.dtype)
        qw = _quantize(ctx, hp_weight, "w", along=1)  # without fprop in FP8 too: histories and probes go on
        if ctx.fprop != "high_precision":
            y = _gemm(ctx, "fprop", qx, qw, x.dtype, bias)
        else:
            hp_bias = None if bias is None else bias.to(x.dtype)
            y = F.linear(x, hp_weight, hp_bias).mul(module.output_multiplier)

        kept: Sequence[Tensor] = ()
        if ctx.needs_input_grad[1]:
            if ctx.wgrad != "high_precision":
                # wgrad contracts over tokens, so block scales must run along that dimension.
                found = shared.get("kept")
                if found is None:
                    if ctx.recipe.by_direction:
                        qx = _quantize(ctx, x, "x", along=0, probed=False)
                    packed = ctx.recipe.scaling("x", 0).pack(qx)
                    found = *packed, (qx.block, qx.fmt, qx.nan_free)
                    shared.put("kept", *found)
                *kept, ctx.x_layout = found
            else:
                kept = (x,)
                ctx.reads_smoothly = True  # a product: activation compression may round x
        # Like nn.Linear, keep the weight itself: dgrad quantises it again, which costs less than keeping a copy.
        ctx.save_for_backward(weight, *kept)
        ctx.x_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        dx = dw = db = None
        with torch.autocast(autocast_type(dy.device), enabled=False):
            qdy = None
            if needs_x or not ctx.recipe.by_direction:
                qdy = _quantize(ctx, dy, "dy", along=1)
            if needs_x:
                assert qdy is not None
                hp_weight = in_high_precision(weight, ctx.x_dtype)
                if ctx.dgrad != "high_precision":
                    qw = _quantize(ctx, hp_weight, "w", along=0, probed=False)
                    dx = _gemm(ctx, "dgrad", qdy, qw.t(), ctx.x_dtype)
                else:
                    dx = (dy @ hp_weight).mul(ctx.module.output_multiplier)
            if needs_w and ctx.wgrad != "high_precision":
                if ctx.recipe.by_direction:
                    qdy = _quantize(ctx, dy, "dy", along=0, probed=qdy is None)
                assert qdy is not None
                data, scale = ctx.recipe.scaling("x", 0).unpack(*kept)
                block, fmt, nan_free = ctx.x_layout
                # Where there was an Inf the scale is already NaN, so the amax is not needed.
                qx = Quantized(data, scale, block, fmt, torch.zeros_like(scale), nan_free)
                dw = _gemm(ctx, "wgrad", qdy.t(), qx.t(), ctx.x_dtype).to(weight.dtype)
            elif needs_w:
                dw = (dy.t() @ kept[0]).mul(ctx.module.output_multiplier).to(weight.dtype)
            if needs_b:
                db = dy.float().sum(dim=0).to(ctx.bias_dtype)
        return dx, dw, db, None, None, None


def _quantize(
    ctx: Any,
    x: Tensor,
    operand: Operand,
    *,
    along: int,
    probed: bool = True,
    shared: QuantizedInput | None = None,
) -> Quantized:
    """``x`` quantised, or taken from ``shared``; either way the amax is recorded and the probe is called."""
    module = ctx.module
    found = None if shared is None else shared.get("quantized")
    if found is None:
        given = {"scale": ctx.scales.get(operand), "number": ctx.number}
        quantized = quantize_operand(x, operand, ctx.recipe, along=along, **given)
    else:
        quantized = Quantized(*found)
    if shared is not None and found is None:
        q = quantized
        shared.put("quantized", q.data, q.scale_inv, q.block, q.fmt, q.amax, q.nan_free)
    if operand in ctx.recording and ctx.recipe.uses_history:
        module.slots[operand].record(quantized.amax)
    if probed and module.probe is not None:
        scaling, seen = ctx.recipe.scaling(operand, along), quantized
        if scaling.transforms:
            seen = quantize_operand(x, operand, ctx.recipe, along=1, number=ctx.number)
        module.probe(operand, x, seen if scaling.measures_amax else with_amax(seen, x))
    return quantized


def _gemm(
    ctx: Any, gemm: Gemm, a: Quantized, b: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    if getattr(ctx, gemm) == "dequantized":
        added = None if bias is None else bias.to(out_dtype)
        dense = a.dequantize().to(out_dtype), b.dequantize().to(out_dtype)
        return F.linear(*dense, added).mul(ctx.module.output_multiplier)
    power_2, by_row = ctx.recipe.powers_of_two, ctx.recipe.by_row
    sums: Sums = "float32"
    if ctx.module.backend.options.accumulation == "hopper":
        sums = "hopper_fast" if ctx.recipe.accumulates_fast(gemm) else "hopper_precise"
    how: dict[str, Any] = {"power_2": power_2, "sums": sums, "by_row": by_row}
    return scaled_mm(a, b, out_dtype=out_dtype, bias=bias, alpha=ctx.module.output_multiplier, **how)
