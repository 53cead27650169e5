"""What FP8 does to q, k, v, the output and its gradient of an attention, or would do to those of one that is demoted."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.attention import SLOTS, FP8DotProductAttention, attention_format
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.autocast import autocast_type
from foundry_fp8.numerics.formats import E4M3, Float8Format
from foundry_fp8.numerics.quantize import quantize_tensor, scale_from_amax
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling, Recipe
from foundry_fp8.observe.divergence.shadow import tensorwise
from foundry_fp8.observe.operand_stats import FIELDS, Sample, rounding_noise, sample_rows, spread

__all__ = ["ATTENTION_OPERANDS", "AttentionWatch", "logit_noise", "output_error", "probabilities"]

ATTENTION_OPERANDS = ("q", "k", "v", "do")
FORWARD = ATTENTION_OPERANDS[:3]
HEADS, QUERIES = 4, 8
"""Of how many heads of the batch, and of how many queries of each, the output is looked at."""


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
    output: dict[Literal["real", "shadow"], Tensor]
    """:func:`output_error` of what runs, and of the rung above."""


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
                looked = Looked(
                    softmax_scale=softmax_scale, head_dim=q.shape[-1], real={}, shadow={}, amax={}, output={}
                )
                self._found[name] = looked
                before = {operand: amax.get((name, operand)) for operand in ATTENTION_OPERANDS}
                with torch.no_grad():
                    # Q, K and V share one scale under delayed scaling.
                    largest = _largest([before[operand] for operand in FORWARD])
                    _measure(looked, module, above, largest, dict(zip(FORWARD, (q, k, v), strict=True)))
                    _measure_output(looked, module, above, largest, q, k, v, mask)
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
) -> None:
    """What rounding probabilities and values does to the output, for what runs and for the rung above."""
    recipes: dict[Literal["real", "shadow"], tuple[Recipe, Tensor | None]] = {}
    if module.recipe is not None:
        recipes["real"] = module.recipe, _scale(module, "v")
    if above is not None and (before is not None or not isinstance(above, DelayedScaling)):
        recipes["shadow"] = above, _would(above, "v", before, v)
    if not recipes:
        return
    p, values = probabilities(q, k, v, mask, looked.softmax_scale)
    # Known beforehand under either recipe; without a slot (Transformer Engine's), what probabilities of up to 1 make of it.
    of_p = module.slots["s"].scale if module.slots else scale_from_amax(p.new_ones(()), E4M3)
    for rung, (recipe, scale) in recipes.items():
        fmt, of_v = _format_and_scale("v", looked.amax["v"], recipe, scale)
        p8 = quantize_tensor(p, of_p, E4M3).dequantize().float()
        v8 = quantize_tensor(values, of_v, fmt).dequantize().float()
        looked.output[rung] = output_error(p, values, p8, v8, rounding_noise(E4M3) + rounding_noise(fmt))


def probabilities(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """The softmax of :data:`QUERIES` queries of :data:`HEADS` heads of the batch, and the values of those.

    Args:
        q: ``[b, heads, q, d]``, hp.
        k: ``[b, kv_heads, k, d]``.
        v: Likewise.
        mask: What each query sees; one that sees nothing has zeros.
        softmax_scale: Multiplies the logits.

    Returns:
        float32 ``[n, m, k]`` and ``[n, k, d]``.
    """
    b, heads, queries, _ = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    host = torch.device("cpu")
    places = [divmod(i, heads) for i in spread(b * heads, HEADS, host)[0].tolist()]
    rows = spread(queries, QUERIES, q.device)[0]
    of_q = torch.stack([q[i, head] for i, head in places]).index_select(1, rows).float()
    of_k, of_v = (torch.stack([x[i, head // group] for i, head in places]).float() for x in (k, v))
    with torch.autocast(autocast_type(q.device), enabled=False):
        logits = of_q @ of_k.mT * softmax_scale
    for m, place in enumerate(spread(queries, QUERIES, host)[0].tolist()):
        seen, bias = mask.block(place, place + 1, 0, keys, queries, keys, q.device)
        if bias is not None:
            logits[:, m] += torch.stack([_of(bias, *where) for where in places]).float()
        if seen is not None:
            logits[:, m] = logits[:, m].where(
                torch.stack([_of(seen, *where) for where in places]), -torch.inf
            )
    most = logits.amax(-1, keepdim=True)
    p = (logits - torch.where(most == -torch.inf, 0.0, most)).exp()
    total = p.sum(-1, keepdim=True)
    return p / torch.where(total == 0, 1.0, total), of_v


def _of(part: Tensor, batch: int, head: int) -> Tensor:
    """The keys of one query, ``[k]`` or ``[1]``, of what broadcasts to ``[b, heads, 1, k]``."""
    part = part.reshape((1,) * (4 - part.dim()) + part.shape)
    return part[batch if part.shape[0] > 1 else 0, head if part.shape[1] > 1 else 0, 0]


def output_error(p: Tensor, v: Tensor, p8: Tensor, v8: Tensor, noise: float) -> Tensor:
    """What rounding did to ``p v``, as :func:`~foundry_fp8.observe.product_noise.product_noise` reads it, float64 ``[3]``: of each query's
    output, the error relative to it, squared, 1 at most, summed; of how many queries; what rounding alone makes of it.

    Args:
        p: ``[n, m, k]``.
        v: ``[n, k, d]``.
        p8: ``p``, rounded.
        v8: ``v``, rounded.
        noise: The relative error, squared, of rounding alone.
    """
    with torch.autocast(autocast_type(p.device), enabled=False):
        o = p @ v
        error = p8 @ v8 - o
    size, lost = (x.double().square().sum(-1) for x in (o, error))
    counted = size != 0  # true for NaN
    found = torch.where(counted, (lost / size).clamp_max(1.0), 0.0)
    return torch.stack([found.sum(), counted.double().sum(), found.new_full((), noise)])


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
