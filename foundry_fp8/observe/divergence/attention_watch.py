"""What FP8 does to q, k, v, the probabilities, the output and its gradient of an attention, or would do to those of one that is demoted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.attention import SLOTS, FP8DotProductAttention, attention_format
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.autocast import autocast_type
from foundry_fp8.numerics.formats import E4M3, Float8Format
from foundry_fp8.numerics.quantize import amax_of, quantize_tensor, scale_from_amax
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling, Recipe
from foundry_fp8.observe.attention_error import Spots, logit_error, output_error, part_of
from foundry_fp8.observe.divergence.shadow import tensorwise
from foundry_fp8.observe.loss_cost import attention_cost
from foundry_fp8.observe.operand_stats import rounding_noise, sample_rows

__all__ = ["ATTENTION_OPERANDS", "AttentionWatch", "Look", "Rung"]

ATTENTION_OPERANDS = ("q", "k", "v", "do")
FORWARD = ATTENTION_OPERANDS[:3]
Rung = Literal["real", "shadow"]


@dataclasses.dataclass(frozen=True)
class Looked:
    """What was measured of one attention, each of what runs and of the rung above, where there is one and a scale is known for it."""

    operands: dict[Rung, dict[str, Tensor]]
    """Rows as :func:`~foundry_fp8.observe.operand_health.measure` gives them, by operand; of what runs, none where that is high precision."""
    amax: dict[str, Tensor]
    """Of each operand, whatever runs."""
    logits: dict[Rung, Tensor]
    """:func:`~foundry_fp8.observe.attention_error.logit_error`."""
    output: dict[Rung, Tensor]
    """:func:`~foundry_fp8.observe.attention_error.output_error`."""
    costs: dict[Rung, Tensor]
    """:func:`~foundry_fp8.observe.loss_cost.attention_cost`, once a gradient came back."""


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
                q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax_scale: float, out: Tensor, heads_dim: int,
                name: str = name, module: FP8DotProductAttention = module, above: Recipe | None = above,
            ) -> None:  # fmt: skip
                training = module.training and torch.is_grad_enabled()
                if name in self._found or inside_backward() or not training or not q.numel():
                    return
                before = {operand: amax.get((name, operand)) for operand in ATTENTION_OPERANDS}
                one = Look(module, above, before)
                self._found[name] = one.found
                one.see_forward(q, k, v, mask, softmax_scale, out)
                if out.grad_fn is not None:
                    number = out.output_nr

                    def see(gradients: tuple[Tensor | None, ...]) -> None:
                        if (gradient := gradients[number]) is not None:
                            one.see_gradient(gradient, heads_dim)

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


class Look:
    """One look at one attention: at a forward, and at what comes back for it.

    Args:
        module: The attention.
        above: The recipe of the rung above, or ``None``.
        before: The amax of each operand in the due batch before, or ``None``.

    Attributes:
        found: What was measured so far.
    """

    def __init__(self, module: FP8DotProductAttention, above: Recipe | None, before: Mapping[str, float | None]) -> None:  # fmt: skip
        self._recipes: dict[Rung, Recipe] = {}
        if module.recipe is not None:
            self._recipes["real"] = module.recipe
        if above is not None:
            self._recipes["shadow"] = above
        self._scales: dict[str, Tensor] = {}
        if isinstance(module.recipe, DelayedScaling):  # as they are now
            self._scales = {
                tensor: module.slots[SLOTS[tensor]].scale for tensor in (*ATTENTION_OPERANDS, "o")
            }
        self._scale_of_p = module.slots["s"].scale if module.slots else None
        of_forward = [before[operand] for operand in FORWARD]
        largest = None if None in of_forward else max(value for value in of_forward if value is not None)
        self._before = {**dict.fromkeys(FORWARD, largest), "do": before["do"]}  # q, k and v share one scale
        self._errors: dict[Rung, Tensor] = {}
        self.found = Looked({rung: {} for rung in self._recipes}, {}, {}, {}, {})

    @torch.no_grad()
    def see_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax_scale: float, out: Tensor
    ) -> None:
        """What is multiplied, q ``[b, heads, q, d]``, k and v ``[b, kv_heads, k, d]``, hp, and what comes out."""
        for operand, x in zip(FORWARD, (q, k, v), strict=True):
            self._measure(operand, x)
        self._spots = Spots.spread(q)
        self._heads, self._tokens = q.shape[1], q.shape[0] * q.shape[2]
        part = part_of(q, k, v, mask, softmax_scale, self._spots)
        log_p = part.log_probabilities(part.q, part.k)
        p = log_p.exp().float()
        # Known beforehand under either recipe; without a slot (Transformer Engine's), what probabilities of up to 1 make of it.
        of_p = scale_from_amax(p.new_ones(()), E4M3) if self._scale_of_p is None else self._scale_of_p

        def rounded_p(exact: Tensor) -> Tensor:
            return quantize_tensor(exact.float(), of_p, E4M3).dequantize().float()

        for rung in self._recipes:
            rounded = {}
            for operand, x in (("q", part.q), ("k", part.k), ("v", part.v)):
                if (how := self._format_and_scale(rung, operand)) is not None:
                    fmt, scale = how
                    rounded[operand] = quantize_tensor(x, scale, fmt).dequantize().float()
            if rounded.keys() != set(FORWARD):
                continue
            log_p8 = part.log_probabilities(rounded["q"], rounded["k"])
            self.found.logits[rung] = logit_error(log_p, log_p8)
            noise = rounding_noise(E4M3) + rounding_noise(fmt)
            self.found.output[rung] = output_error(p, part.v, rounded_p(p), rounded["v"], noise)
            with torch.autocast(autocast_type(q.device), enabled=False):
                o, o8 = p @ part.v, rounded_p(log_p8.exp()) @ rounded["v"]
            self._errors[rung] = self._put_out(rung, o8, out) - o

    @torch.no_grad()
    def see_gradient(self, do: Tensor, heads_dim: int) -> None:
        """Of the output, hp, laid out as that is (:data:`~foundry_fp8.layers.attention.AttentionLook`); the first one."""
        if "do" in self.found.amax:
            return
        by_heads = do if do.dim() == 4 else do.unflatten(-1, (self._heads, -1))
        self._measure("do", by_heads)
        looked = self._spots.take(by_heads.movedim(heads_dim, 1))
        for rung, error in self._errors.items():
            self.found.costs[rung] = attention_cost(error, looked, self._spots.of, self._tokens)

    def _put_out(self, rung: Rung, o: Tensor, out: Tensor) -> Tensor:
        """Through FP8 where the recipe's kernel writes FP8."""
        recipe = self._recipes[rung]
        if not isinstance(recipe, DelayedScaling):
            return o
        fmt = attention_format(recipe, SLOTS["o"])
        scale = self._scales["o"] if rung == "real" else scale_from_amax(amax_of(out), fmt)
        return quantize_tensor(o, scale, fmt).dequantize().float()

    def _measure(self, operand: str, x: Tensor) -> None:
        flat = x.detach().reshape(-1, x.shape[-1])
        sample = sample_rows(flat)
        self.found.amax[operand] = sample.amax
        for rung, rows in self.found.operands.items():
            if (how := self._format_and_scale(rung, operand)) is not None:
                fmt, scale = how
                rows[operand] = tensorwise(flat, sample, scale, fmt)

    def _format_and_scale(self, rung: Rung, operand: str) -> tuple[Float8Format, Tensor] | None:
        """Of an operand whose amax was measured; ``None`` where delayed scaling would need a past that nobody saw."""
        recipe = self._recipes[rung]
        assert isinstance(recipe, DelayedScaling | CurrentScaling)
        fmt = attention_format(recipe, SLOTS[operand])
        amax = self.found.amax[operand]
        if isinstance(recipe, CurrentScaling):
            return fmt, scale_from_amax(amax, fmt, power_2=recipe.power_2_scales)
        if rung == "real":
            return fmt, self._scales[operand]
        if (before := self._before[operand]) is None:
            return None
        return fmt, scale_from_amax(amax.new_tensor(before), fmt) * 2.0**-recipe.margin
