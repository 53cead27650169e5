"""What FP8 does to q, k and v of an attention, or would do to those of one that is demoted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.attention import FP8DotProductAttention, attention_format
from foundry_fp8.numerics.quantize import scale_from_amax
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling, Recipe
from foundry_fp8.observe.divergence.shadow import tensorwise
from foundry_fp8.observe.operand_stats import FIELDS, Sample, sample_rows

__all__ = ["ATTENTION_OPERANDS", "AttentionWatch", "logit_noise"]

ATTENTION_OPERANDS = ("q", "k", "v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Looked:
    """What was measured of one attention: rows as :func:`~foundry_fp8.observe.operand_health.measure` gives them."""

    softmax_scale: float
    head_dim: int
    real: Mapping[str, Tensor]
    """By operand, of what runs; empty where that is high precision."""
    shadow: Mapping[str, Tensor]
    """Of the rung above, where there is one and a scale for it."""
    amax: Mapping[str, Tensor]


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
                q: Tensor, k: Tensor, v: Tensor, softmax_scale: float,
                name: str = name, module: FP8DotProductAttention = module, above: Recipe | None = above,
            ) -> None:  # fmt: skip
                training = module.training and torch.is_grad_enabled()
                if name in self._found or inside_backward() or not training or not q.numel():
                    return
                before = [amax.get((name, operand)) for operand in ATTENTION_OPERANDS]
                with torch.no_grad():
                    self._found[name] = _measure(module, above, before, (q, k, v), softmax_scale)

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


def _measure(
    module: FP8DotProductAttention,
    above: Recipe | None,
    before: Sequence[float | None],
    operands: tuple[Tensor, Tensor, Tensor],
    softmax_scale: float,
) -> Looked:
    flat = [x.detach().reshape(-1, x.shape[-1]) for x in operands]
    samples = [sample_rows(x) for x in flat]
    # Q, K and V share one scale under delayed scaling.
    known = None if None in before else max(value for value in before if value is not None)
    real, shadow = {}, {}
    for operand, x, sample in zip(ATTENTION_OPERANDS, flat, samples, strict=True):
        if module.recipe is not None:
            slot = module.slots.get("qkv")
            scale = None if slot is None or isinstance(module.recipe, CurrentScaling) else slot.scale
            real[operand] = _row(x, sample, module.recipe, scale)
        if above is not None and (known is not None or not isinstance(above, DelayedScaling)):
            scale = None
            if isinstance(above, DelayedScaling):
                fmt = attention_format(above, "qkv")
                scale = scale_from_amax(torch.tensor(known, device=x.device), fmt) * 2.0**-above.margin
            shadow[operand] = _row(x, sample, above, scale)
    amax = {o: sample.amax for o, sample in zip(ATTENTION_OPERANDS, samples, strict=True)}
    return Looked(softmax_scale=softmax_scale, head_dim=flat[0].shape[1], real=real, shadow=shadow, amax=amax)


def _row(x: Tensor, sample: Sample, recipe: Recipe, scale: Tensor | None) -> Tensor:
    assert isinstance(recipe, DelayedScaling | CurrentScaling)
    fmt = attention_format(recipe, "qkv")
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
