"""What quantisation would do to the operands of a layer that does not run that recipe now.

Only the sampled rows are quantised, with the scale that the whole tensor would have: that of its own amax, or under delayed scaling
the one that its history makes, which is kept up in every pass while the layer runs something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from foundry_fp8.backends.emulated.quantizers import quantize_operand
from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.deferred_norm import deferred_norm_of
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.formats import Float8Format
from foundry_fp8.numerics.quantize import amax_of, quantize_tensor, scale_from_amax
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling, Operand, Recipe
from foundry_fp8.observe.operand_health import Products, Seen, wgrad_in_fp8
from foundry_fp8.observe.operand_stats import Sample, sample_rows

__all__ = ["LinearShadow", "shadow_of", "tensorwise"]

Guard = Callable[[Callable[..., None]], Callable[..., None]]


def shadow_of(x: Tensor, operand: Operand, recipe: Recipe, scale: Tensor | None = None) -> Seen:
    """``x`` as if it were quantised. A weight is quantised whole: its blocks have several rows, and products look at columns of it.

    Args:
        x: ``[R, C]``, hp.
        operand: Which of a linear's three it is.
        recipe: What would run.
        scale: For the delayed recipe, what it would be multiplied with.
    """
    if operand == "w":
        return Seen(x, quantize_operand(x, operand, recipe, along=1, scale=scale))
    sample = sample_rows(x)
    rows = sample.take(x)
    if isinstance(recipe, DelayedScaling):
        assert scale is not None
        q = quantize_tensor(rows, scale, recipe.format(operand))
    elif isinstance(recipe, CurrentScaling):
        fmt = recipe.format(operand)
        q = quantize_tensor(rows, scale_from_amax(sample.amax, fmt, power_2=recipe.power_2_scales), fmt)
    else:
        q = quantize_operand(rows, operand, recipe, along=1)
    return Seen(rows, q, sample, x)


def tensorwise(x: Tensor, sample: Sample, scale: Tensor, fmt: Float8Format) -> Tensor:
    """The same with one known scale, whatever the layer is."""
    rows = sample.take(x)
    return Seen(rows, quantize_tensor(rows, scale, fmt), sample).row


def _one_of(see: Callable[[Tensor], None], number: int, gradients: tuple[Tensor | None, ...]) -> None:
    gradient = gradients[number]
    if gradient is not None:
        see(gradient)


class LinearShadow:
    """Follows demoted linears: their amaxes in every pass where delayed scaling waits for them, and in due batches their shadows,
    in the first microbatch.

    Args:
        guard: Wraps each hook.

    Attributes:
        measures: Whether this batch is due.
        products: Of what would be quantised.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._followed: list[FP8Linear] = []
        self._rows: dict[tuple[str, str], Tensor] = {}
        self.products = Products()
        self.measures = False

    def follow(self, linears: Mapping[str, tuple[FP8Linear, Recipe]]) -> None:
        """Follow these from now on, and no others: by name, each with the recipe that would run."""
        for module in self._followed:
            module.look = None
        self._followed = [module for module, _ in linears.values()]
        for name, (module, recipe) in linears.items():
            module.look = self._guard(functools.partial(self._look, name, module, recipe))

    def _look(self, name: str, module: FP8Linear, recipe: Recipe, x: Tensor, output: Tensor) -> None:
        trains = module.training and torch.is_grad_enabled() and not inside_backward()
        if not trains or not x.numel() or not (self.measures or module.slots):
            return
        see = functools.partial(self._see, name, module, recipe)
        norm = deferred_norm_of(module)
        dtype = compute_dtype(x)
        with torch.no_grad():  # else a checkpoint counts what the norm saves, and its recompute, which is not looked at, saves less
            see("x", (x if norm is None else norm.normalise(x)).to(dtype))
            see("w", module.matrix.to(dtype))
        if output.grad_fn is not None:
            # After all hooks on the tensor, those to come too, as the layer's own backward would.
            output.grad_fn.register_prehook(
                self._guard(functools.partial(_one_of, functools.partial(see, "dy"), output.output_nr))
            )

    @torch.no_grad()
    def _see(self, name: str, module: FP8Linear, recipe: Recipe, operand: Operand, x: Tensor) -> None:
        flat = x.detach().reshape(-1, x.shape[-1])
        slot = None if module.slots is None else module.slots[operand]
        if self.measures and (name, operand) not in self._rows:
            scale = None if slot is None else slot.scale
            seen = shadow_of(flat, operand, recipe, scale)
            self._rows[name, operand] = seen.row
            self.products.take(name, operand, seen, wgrad=wgrad_in_fp8(module))
        if slot is not None:
            slot.record(amax_of(flat))

    def tensors(self) -> dict[tuple[str, str], Tensor]:
        """What was measured since the last call: a row of each operand."""
        rows, self._rows = self._rows, {}
        return rows
