"""What quantisation does to the operands of FP8 layers: saturation, underflow, noise."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.observe.sampling import spread_rows
from foundry_fp8.observe.unchanged_state import fp8_layers

__all__ = ["ATTENTION", "LINEAR", "Health", "HealthProbe", "Operand", "measure", "summarise"]

SAMPLE = 128
"""Rows of a large operand that are measured, beside the row with the largest value."""

Operand = Literal["x", "w", "dy", "q", "k", "v", "do"]
LINEAR: tuple[Operand, ...] = ("x", "w", "dy")
ATTENTION: tuple[Operand, ...] = ("q", "k", "v", "do")
"""The operands of attention that are quantised whole; probabilities and scores are quantised block by block inside of the kernel."""


@dataclasses.dataclass(frozen=True)
class Health:
    """What quantisation did to one operand of one layer.

    Attributes:
        amax: max |x|.
        scale: What the block with that amax was multiplied by (the tensor's scale where it has one).
        saturated: Share of elements beyond what rounding alone would bring to the format's maximum.
        flushed: Share of elements that were not zero and became zero.
        sqnr_db: ``20 log10(|x| / |x - Q(x)|)``, Frobenius norms, dB; Inf if nothing was lost, NaN if something is not finite.
    """

    amax: float
    scale: float
    saturated: float
    flushed: float
    sqnr_db: float


def measure(x: Tensor, q: Quantized) -> Tensor:
    """The sums behind :class:`Health`.

    All rows of an operand of up to ``SAMPLE``; of a larger one ``SAMPLE`` evenly spread rows, scaled to the whole, and the row with the
    largest value, which counts once. Nothing is read by the host.

    Args:
        x: ``[R, C]``, hp.
        q: ``x`` quantised.

    Returns:
        float64 ``[7]``: amax, scale, elements, saturated, flushed, sum of x^2, sum of (x - Q(x))^2.
    """
    x = x.detach()
    rows, weight = _rows(x)
    near = _take(x, rows).float()
    # Powers of two near 1: the square of 1e-25 is none that float32 holds.
    shift = torch.ldexp(torch.ones_like(q.amax.max()), -torch.frexp(near.abs().max())[1].clamp(-126, 126))
    data = _take(q.data, rows).float()
    half_step = {6.0: 1.0, 448.0: 16.0, 57344.0: 4096.0}.get(q.fmt.max, 0.0)  # which rounds to the maximum
    saturated = near.abs() > _per_element(q, q.scale_inv, rows, x.shape[1]) * (q.fmt.max + half_step)
    error = near * shift - data * (_per_element(q, q.gemm_scale, rows, x.shape[1]) * shift)
    counts = [saturated.sum(1), data.eq(0).sum(1) - near.eq(0).sum(1)]
    squares = [s.square().sum(1).double() / shift.double().square() for s in (near * shift, error)]
    sums = torch.stack([s.double() for s in (*counts, *squares)]) @ weight
    # gather: an index of one element would be read by the host, which waits for the device.
    scale = q.scale_inv.flatten().gather(0, q.amax.flatten().argmax(0, keepdim=True)).double().reciprocal()
    return torch.cat([q.amax.max().double()[None], scale, weight.new_full((1,), float(x.numel())), sums])


def summarise(sums: Sequence[float]) -> Health:
    """The :class:`Health` from one :func:`measure`."""
    amax, scale, elements, saturated, flushed, signal, error = sums
    if error == 0:
        sqnr = math.inf
    elif signal > 0 and math.isfinite(signal) and math.isfinite(error):
        sqnr = 10 * math.log10(signal / error)
    else:
        sqnr = math.nan
    return Health(amax, scale, saturated / elements, flushed / elements, sqnr)


def _rows(x: Tensor) -> tuple[Tensor | None, Tensor]:
    """The sampled rows of ``x`` (``None`` for all), and how many rows each stands for, float64."""
    if len(x) <= SAMPLE:
        return None, torch.ones(len(x), dtype=torch.float64, device=x.device)
    return spread_rows(x, SAMPLE)


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    if rows is None:
        return x
    if x.element_size() == 1:  # index_select is not written for FP8
        return x.view(torch.uint8).index_select(0, rows).view(x.dtype)
    return x.index_select(0, rows)


def _per_element(q: Quantized, per_block: Tensor, rows: Tensor | None, columns: int) -> Tensor:
    """``per_block``, so that it broadcasts against the sampled rows."""
    if q.block is None:
        return per_block
    if rows is not None:
        per_block = per_block.index_select(0, rows // q.block[0])
    elif q.block[0] > 1:
        per_block = per_block.repeat_interleave(q.block[0], 0)[: len(q.data)]
    return per_block.repeat_interleave(q.block[1], 1)[:, :columns]


class HealthProbe:
    """Measures every operand that the FP8 layers of a model quantise, while attached, in their first microbatch.

    Attributes:
        modules: The layers that are measured, by name.
    """

    def __init__(self, model: nn.Module, guard: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self.modules = fp8_layers(model)
        self._guard = guard
        self._sums: dict[tuple[str, Operand], Tensor] = {}

    def attach(self) -> None:
        """Start measuring. One probe at a time measures a model."""
        for name, module in self.modules.items():
            module.probe = self._guard(functools.partial(self._measure, name))

    def detach(self) -> None:
        """Stop measuring; what was measured stays."""
        for module in self.modules.values():
            module.probe = None

    def collect(self) -> dict[tuple[str, Operand], Health]:
        """What was measured since the last call, by layer and operand. One copy to the host."""
        sums, self._sums = self._sums, {}
        rows = torch.stack(list(sums.values())).tolist() if sums else []
        return dict(zip(sums, map(summarise, rows), strict=True))

    @torch.no_grad()
    def _measure(self, name: str, operand: Operand, x: Tensor, q: Quantized) -> None:
        recomputed = operand not in ("dy", "do") and inside_backward()  # by activation checkpointing
        known = operand in (*LINEAR, *ATTENTION) and (name, operand) not in self._sums
        if known and x.numel() and not recomputed:
            self._sums[name, operand] = measure(x, q)
