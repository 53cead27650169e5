"""What FP8 does to q, k, v, the probabilities, the output and its gradient of an attention, or would do to those of one that is demoted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.attention import SLOTS, FP8DotProductAttention, attention_format
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.numerics.formats import E4M3, Float8Format
from foundry_fp8.numerics.quantize import quantize_tensor, scale_from_amax
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling, Recipe
from foundry_fp8.observe.attention_error import logit_error, output_error, part_of
from foundry_fp8.observe.divergence.shadow import tensorwise
from foundry_fp8.observe.operand_stats import Sample, rounding_noise, sample_rows

__all__ = ["ATTENTION_OPERANDS", "AttentionWatch"]

ATTENTION_OPERANDS = ("q", "k", "v", "do")
FORWARD = ATTENTION_OPERANDS[:3]
Rung = Literal["real", "shadow"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Looked:
    """What was measured of one attention: rows as :func:`~foundry_fp8.observe.operand_health.measure` gives them."""

    real: dict[str, Tensor]
    """By operand, of what runs; empty where that is high precision."""
    shadow: dict[str, Tensor]
    """Of the rung above, where there is one and a scale for it."""
    amax: dict[str, Tensor]
    logits: dict[Rung, Tensor]
    """:func:`~foundry_fp8.observe.attention_error.logit_error` of what runs, and of the rung above."""
    output: dict[Rung, Tensor]
    """:func:`~foundry_fp8.observe.attention_error.output_error`, likewise."""


class AttentionWatch:
    """Measures attentions while attached, in their first microbatch.

    Args:
        guard: Wraps each hook.
    """

    def __init__(self, guard: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self._guard = guard
        self._looking: list[FP8DotProductAttention] = []
        self._found: dict[str, Looked] = {}

    def attach(
        self,
        attentions: Mapping[str, tuple[FP8DotProductAttention, Recipe | None]],
        amax: Mapping[tuple[str, str], float],
    ) -> None:
        """Begin to look.

        Args:
            attentions: By name, each with the recipe of the rung above, or ``None``.
            amax: Of each operand in the due batch before.
        """
        for name, (module, above) in attentions.items():

            def look(
                q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax_scale: float, out: Tensor,
                name: str = name, module: FP8DotProductAttention = module, above: Recipe | None = above,
            ) -> None:  # fmt: skip
                training = module.training and torch.is_grad_enabled()
                if name in self._found or inside_backward() or not training or not q.numel():
                    return
                looked = Looked(real={}, shadow={}, amax={}, logits={}, output={})
                self._found[name] = looked
                before = {operand: amax.get((name, operand)) for operand in ATTENTION_OPERANDS}
                with torch.no_grad():
                    # Q, K and V share one scale under delayed scaling.
                    largest = _largest([before[operand] for operand in FORWARD])
                    _measure(looked, module, above, largest, dict(zip(FORWARD, (q, k, v), strict=True)))
                    _measure_output(looked, module, above, largest, q, k, v, mask, softmax_scale)
                if out.grad_fn is not None:
                    see = functools.partial(
                        _see_gradient,
                        looked,
                        module,
                        above,
                        before["do"],
                        _scale(module, "do"),
                        v.shape[-1],
                        out.output_nr,
                    )
                    # After all hooks on the tensor, those to come too, as the attention's own backward would.
                    out.grad_fn.register_prehook(self._guard(see))

            module.look = self._guard(look)
            self._looking.append(module)

    def detach(self) -> None:
        """Look no more."""
        for module in self._looking:
            module.look = None
        self._looking.clear()

    def collect(self) -> dict[str, Looked]:
        """What was measured since the last call."""
        found, self._found = self._found, {}
        return found


def _largest(known: Sequence[float | None]) -> float | None:
    return None if None in known else max(value for value in known if value is not None)


def _scale(module: FP8DotProductAttention, operand: str) -> Tensor | None:
    """Of delayed scaling, as it is now."""
    if not isinstance(module.recipe, DelayedScaling):
        return None
    return module.slots[SLOTS[operand]].scale


@torch.no_grad()
def _see_gradient(
    looked: Looked,
    module: FP8DotProductAttention,
    above: Recipe | None,
    before: float | None,
    scale: Tensor | None,
    features: int,
    number: int,
    gradients: tuple[Tensor | None, ...],
) -> None:
    gradient = gradients[number]
    if gradient is not None and "do" not in looked.amax:
        _measure(looked, module, above, before, {"do": gradient.reshape(-1, features)}, scale)


def _measure(
    looked: Looked,
    module: FP8DotProductAttention,
    above: Recipe | None,
    before: float | None,
    operands: Mapping[str, Tensor],
    scale: Tensor | None = None,
) -> None:
    """Operands of one slot.

    Args:
        looked: Takes it.
        module: Whose.
        above: The recipe of the rung above, or ``None``.
        before: The largest amax in the due batch before, or ``None``.
        operands: hp, by name, ``[..., d]``.
        scale: Of delayed scaling, if it is not the present one.
    """
    for operand, x in operands.items():
        flat = x.detach().reshape(-1, x.shape[-1])
        sample = sample_rows(flat)
        looked.amax[operand] = sample.amax
        if module.recipe is not None:
            looked.real[operand] = _row(
                flat, operand, sample, module.recipe, _scale(module, operand) if scale is None else scale
            )
        if above is not None and (before is not None or not isinstance(above, DelayedScaling)):
            looked.shadow[operand] = _row(flat, operand, sample, above, _would(above, operand, before, x))


def _would(above: Recipe, operand: str, before: float | None, x: Tensor) -> Tensor | None:
    """The scale that the rung above would have, if it is one of delayed scaling."""
    if not isinstance(above, DelayedScaling):
        return None
    fmt = attention_format(above, SLOTS[operand])
    return scale_from_amax(torch.tensor(before, device=x.device), fmt) * 2.0**-above.margin


def _row(x: Tensor, operand: str, sample: Sample, recipe: Recipe, scale: Tensor | None) -> Tensor:
    fmt, scale = _format_and_scale(operand, sample.amax, recipe, scale)
    return tensorwise(x, sample, scale, fmt)


def _format_and_scale(operand: str, amax: Tensor, recipe: Recipe, scale: Tensor | None) -> tuple[Float8Format, Tensor]:  # fmt: skip
    assert isinstance(recipe, DelayedScaling | CurrentScaling)
    fmt = attention_format(recipe, SLOTS[operand])
    if scale is None:
        power_2 = isinstance(recipe, CurrentScaling) and recipe.power_2_scales
        scale = scale_from_amax(amax, fmt, power_2=power_2)
    return fmt, scale


def _measure_output(
    looked: Looked,
    module: FP8DotProductAttention,
    above: Recipe | None,
    before: float | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    softmax_scale: float,
) -> None:
    """What rounding does to probabilities and output, for what runs and for the rung above."""
    recipes: dict[Rung, Recipe] = {}
    if module.recipe is not None:
        recipes["real"] = module.recipe
    if above is not None and (before is not None or not isinstance(above, DelayedScaling)):
        recipes["shadow"] = above
    if not recipes:
        return
    part = part_of(q, k, v, mask, softmax_scale)
    operands = {"q": part.q, "k": part.k, "v": part.v}
    log_p = part.log_probabilities(part.q, part.k)
    p = log_p.exp().float()
    # Known beforehand under either recipe; without a slot (Transformer Engine's), what probabilities of up to 1 make of it.
    of_p = module.slots["s"].scale if module.slots else scale_from_amax(p.new_ones(()), E4M3)
    p8 = quantize_tensor(p, of_p, E4M3).dequantize().float()
    for rung, recipe in recipes.items():
        rounded = {}
        for operand, x in operands.items():
            known = _scale(module, operand) if rung == "real" else _would(recipe, operand, before, x)
            fmt, scale = _format_and_scale(operand, looked.amax[operand], recipe, known)
            rounded[operand] = quantize_tensor(x, scale, fmt).dequantize().float()
        looked.logits[rung] = logit_error(log_p, part.log_probabilities(rounded["q"], rounded["k"]))
        noise = rounding_noise(E4M3) + rounding_noise(fmt)
        looked.output[rung] = output_error(p, part.v, p8, rounded["v"], noise)
