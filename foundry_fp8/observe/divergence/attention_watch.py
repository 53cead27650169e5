"""What FP8 does to q, k, v and the gradient of the output of an attention, or would do to those of one that is demoted."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.attention import SLOTS, FP8DotProductAttention, attention_format
from foundry_fp8.numerics.quantize import scale_from_amax
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling, Recipe
from foundry_fp8.observe.divergence.shadow import tensorwise
from foundry_fp8.observe.operand_stats import FIELDS, Sample, sample_rows

__all__ = ["ATTENTION_OPERANDS", "AttentionWatch", "logit_noise"]

ATTENTION_OPERANDS = ("q", "k", "v", "do")
FORWARD = ATTENTION_OPERANDS[:3]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Looked:
    """What was measured of one attention: rows as :func:`~foundry_fp8.observe.operand_health.measure` gives them."""

    softmax_scale: float
    head_dim: int
    real: dict[str, Tensor]
    """By operand, of what runs; empty where that is high precision."""
    shadow: dict[str, Tensor]
    """Of the rung above, where there is one and a scale for it."""
    amax: dict[str, Tensor]


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
                q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, out: Tensor,
                name: str = name, module: FP8DotProductAttention = module, above: Recipe | None = above,
            ) -> None:  # fmt: skip
                training = module.training and torch.is_grad_enabled()
                if name in self._found or inside_backward() or not training or not q.numel():
                    return
                looked = Looked(
                    softmax_scale=softmax_scale, head_dim=q.shape[-1], real={}, shadow={}, amax={}
                )
                self._found[name] = looked
                before = {operand: amax.get((name, operand)) for operand in ATTENTION_OPERANDS}
                with torch.no_grad():
                    # Q, K and V share one scale under delayed scaling.
                    _measure(
                        looked,
                        module,
                        above,
                        _largest([before[operand] for operand in FORWARD]),
                        dict(zip(FORWARD, (q, k, v), strict=True)),
                    )
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
            would = None
            if isinstance(above, DelayedScaling):
                fmt = attention_format(above, SLOTS[operand])
                would = scale_from_amax(torch.tensor(before, device=x.device), fmt) * 2.0**-above.margin
            looked.shadow[operand] = _row(flat, operand, sample, above, would)


def _row(x: Tensor, operand: str, sample: Sample, recipe: Recipe, scale: Tensor | None) -> Tensor:
    assert isinstance(recipe, DelayedScaling | CurrentScaling)
    fmt = attention_format(recipe, SLOTS[operand])
    if scale is None:
        power_2 = isinstance(recipe, CurrentScaling) and recipe.power_2_scales
        scale = scale_from_amax(sample.amax, fmt, power_2=power_2)
    return tensorwise(x, sample, scale, fmt)


def logit_noise(q: Sequence[float], k: Sequence[float], softmax_scale: float, head_dim: int) -> float:
    """The standard deviation of a logit's error, in logits: at 1 a probability is off by a factor e.

    Rounding's relative error is the same however large the logits are, so it harms where they are large, and no single operand shows
    it.

    Args:
        q: The row of q.
        k: The row of k.
        softmax_scale: What multiplies the logits.
        head_dim: d.

    Source:
        ``softmax_scale * sqrt(d (E[dq^2] E[k^2] + E[q^2] E[dk^2]))``: errors independent of each other and of the values.
    """
    of_q, of_k = (dict(zip(FIELDS, row, strict=False)) for row in (q, k))
    square = {"q": of_q["s2"] / of_q["elements"], "k": of_k["s2"] / of_k["elements"]}
    error = {"q": of_q["error"] / of_q["elements"], "k": of_k["error"] / of_k["elements"]}
    variance = head_dim * (error["q"] * square["k"] + square["q"] * error["k"])
    return abs(softmax_scale) * math.sqrt(variance) if variance >= 0 else math.nan
