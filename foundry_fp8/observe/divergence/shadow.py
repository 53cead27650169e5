"""What quantisation would do to the operands of a layer that does not run that recipe now.

Only the sampled rows are quantised, with the scale that the whole tensor would have: its own amax, or under delayed scaling the
amax of the due batch before, which is what a promotion would begin its history with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.backends.emulated.quantizers import quantize_operand
from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.deferred_norm import deferred_norm_of
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.formats import Float8Format
from foundry_fp8.numerics.quantize import Quantized, quantize_tensor, scale_from_amax
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling, Operand, Recipe
from foundry_fp8.observe.operand_health import with_format
from foundry_fp8.observe.operand_stats import Sample, quantisation, sample_rows

__all__ = ["LinearShadow", "shadow_of", "tensorwise"]

Guard = Callable[[Callable[..., None]], Callable[..., None]]


def shadow_of(x: Tensor, operand: Operand, recipe: Recipe, amax: float | None) -> Tensor | None:
    """:func:`~foundry_fp8.observe.operand_health.measure` of ``x`` as if it were quantised.

    Args:
        x: ``[R, C]``, hp.
        operand: Which of a linear's three it is.
        recipe: What would run.
        amax: For the delayed recipe, what the scale is made from; without it there is no shadow yet.

    Returns:
        The row, or ``None``.
    """
    sample = sample_rows(x)
    if isinstance(recipe, DelayedScaling | CurrentScaling):
        known = sample.amax if isinstance(recipe, CurrentScaling) else amax
        if known is None:
            return None
        power_2 = isinstance(recipe, CurrentScaling) and recipe.power_2_scales
        margin = recipe.margin if isinstance(recipe, DelayedScaling) else 0
        scale = scale_from_amax(
            torch.as_tensor(known, device=x.device), recipe.format(operand), power_2=power_2
        )
        return tensorwise(x, sample, scale * 2.0**-margin, recipe.format(operand))
    if operand == "w" and sample.rows is not None:  # blocks of several rows
        return with_format(
            quantisation(x, quantize_operand(x, operand, recipe, along=1), sample), recipe.format(operand)
        )
    rows = sample.take(x)
    return _of_rows(quantize_operand(rows, operand, recipe, along=1), rows, sample, recipe.format(operand))


def tensorwise(x: Tensor, sample: Sample, scale: Tensor, fmt: Float8Format) -> Tensor:
    """The same with one known scale, whatever the layer is."""
    rows = sample.take(x)
    return _of_rows(quantize_tensor(rows, scale, fmt), rows, sample, fmt)


def _of_rows(q: Quantized, rows: Tensor, sample: Sample, fmt: Float8Format) -> Tensor:
    return with_format(quantisation(rows, q, dataclasses.replace(sample, rows=None)), fmt)


class LinearShadow:
    """The shadows of demoted linears, while attached, in their first microbatch.

    Args:
        guard: Wraps each hook.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._handles: list[Any] = []
        self._rows: dict[tuple[str, str], Tensor] = {}

    def attach(self, linears: Mapping[str, tuple[FP8Linear, Recipe]], amax: Mapping[tuple[str, str], float]) -> None:  # fmt: skip
        """Put the hooks in.

        Args:
            linears: By name, each with the recipe that would run.
            amax: Of each operand in the due batch before.
        """
        for name, (module, recipe) in linears.items():

            def see(operand: Operand, x: Tensor, name: str = name, recipe: Recipe = recipe) -> None:
                if (name, operand) not in self._rows and x.numel():
                    with torch.no_grad():
                        flat = x.detach().reshape(-1, x.shape[-1])
                        row = shadow_of(flat, operand, recipe, amax.get((name, operand)))
                        # Without a scale yet, what the next due batch makes one from.
                        self._rows[name, operand] = sample_rows(flat).amax[None] if row is None else row

            def forward(module: nn.Module, args: Any, output: Any, see: Any = see) -> None:
                assert isinstance(module, FP8Linear)
                if inside_backward() or not torch.is_grad_enabled():
                    return
                norm = deferred_norm_of(module)
                dtype = compute_dtype(args[0])
                see("x", (args[0] if norm is None else norm.normalise(args[0])).to(dtype))
                see("w", module.matrix.to(dtype))
                if output.requires_grad:
                    output.register_hook(self._guard(lambda dy: see("dy", dy)))

            self._handles.append(module.register_forward_hook(self._guard(forward)))

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def tensors(self) -> dict[tuple[str, str], Tensor]:
        """What was measured since the last call: a row of each operand, or its amax alone, ``[1]``."""
        rows, self._rows = self._rows, {}
        return rows
