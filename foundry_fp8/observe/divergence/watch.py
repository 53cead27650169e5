"""What the guard measures on one rank in a due batch."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.names import named_modules_clean
from foundry_fp8.observe.attention_error import logit_noise
from foundry_fp8.observe.divergence.amax_review import AmaxReview
from foundry_fp8.observe.divergence.attention_watch import AttentionWatch, Rung
from foundry_fp8.observe.divergence.ladder import OUTSIDE, Ladder, units_of
from foundry_fp8.observe.divergence.observed import Observed
from foundry_fp8.observe.divergence.shadow import LinearShadow
from foundry_fp8.observe.operand_health import HealthProbe, Products, outliers, summarise
from foundry_fp8.observe.operand_stats import moments, sample_rows
from foundry_fp8.observe.product_noise import product_noise

__all__ = ["Watch", "together"]

OUTLIERS = ("kurtosis", "kurtosis_flat")
NOT_MEASURED = -1.0
PRODUCTS = ("y", "dx", "dw")
CLIPPED = ("x", "w", "qkv", "s", "o")
"""Gradients vary from batch to batch, so that delayed scaling clips some in healthy runs; of those only what is kept out of their
history again and again is counted."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """What the numbers that the ranks exchange are, in order: the loss, signs of every block, amax of every attention's operands,
    damage and shadow of every operand.
    """

    signs: Sequence[tuple[str, str]]
    operands: Sequence[tuple[str, str]]
    damage: Sequence[tuple[str, str, str]]

    @property
    def count(self) -> int:
        """How many numbers."""
        return 1 + len(self.signs) + len(self.operands) + 2 * len(self.damage)

    @property
    def costed(self) -> int:
        """Of how many linears and attentions the cost is asked."""
        return sum(name == "loss_cost" for *_, name in self.damage)


class Watch:
    """Measures, between :meth:`attach` and :meth:`collect`: outliers in what the linears of each block multiply, damage to the FP8
    operands and to the shadows of demoted layers, in the first microbatch; and the norm of the gradients.

    Args:
        model: Wrapped or not.
        ladders: Of its converted layers.
        guard: Wraps each hook.
        reviews: Of amax histories.

    Attributes:
        amax: The amax of each operand of an attention over all ranks where it was measured last; to be set.
        columns: What :meth:`collect` gives.
    """

    def __init__(
        self,
        model: nn.Module,
        ladders: Mapping[str, Ladder],
        guard: Callable[[Callable[..., None]], Callable[..., None]],
        reviews: Collection[AmaxReview] = (),
    ) -> None:
        units, self._unit_of = units_of(model)
        self._ladders = ladders
        self._guard = guard
        self._reviews = reviews
        self.amax: dict[tuple[str, str], float] = {}
        self._products = Products()
        self._health = HealthProbe(model, guard, products=self._products)
        self._shadow = LinearShadow(guard)
        self._attention = AttentionWatch(guard)
        self._plain: dict[str, nn.Module] = {}
        self._parameters: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, module in named_modules_clean(model):
            self._parameters[self._unit_of[name]] += list(module.parameters(recurse=False))
            plain = isinstance(module, nn.Linear) and not isinstance(module, FP8Linear)
            if plain and self._unit_of[name] != OUTSIDE:
                self._plain[name] = module
        self.columns = Columns(
            [(unit, name) for unit in units for name in (*OUTLIERS, "gradient_norm")],
            [
                (name, operand)
                for name, one in ladders.items()
                if not _linear(one)
                for operand in one.operands
            ],
            [where for target, ladder in ladders.items() for where in _damage_of(target, ladder)],
        )
        self._handles: list[Any] = []
        self._moments: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    def follow(self) -> None:
        """Follow the linears that are demoted now."""
        self._shadow.follow(
            {
                name: (ladder.module, ladder.above)
                for name, ladder in self._ladders.items()
                if ladder.above is not None and isinstance(ladder.module, FP8Linear)
            }
        )

    def pulse(self, turn: int) -> str | None:
        """Which linear is looked at between due batches, one a batch in turn; ``None`` if none runs FP8."""
        found = [
            name for name, one in self._ladders.items() if _linear(one) and one.module.recipe is not None
        ]
        return found[turn % len(found)] if found else None

    def attach(self, only: str | None = None) -> None:
        """Put the hooks in: all of them, or what the health of one linear takes."""
        self.detach()
        self._health.attach(only)
        if only is not None:
            return
        self._shadow.measures = True
        attentions = {
            name: (ladder.module, ladder.above)
            for name, ladder in self._ladders.items()
            if isinstance(ladder.module, FP8DotProductAttention)
        }
        self._attention.attach(attentions, self.amax)
        for name, module in self._plain.items():

            def see(module: nn.Module, args: Any, name: str = name) -> None:
                if not inside_backward() and args and isinstance(args[0], Tensor):
                    self._see(name, args[0])

            self._handles.append(module.register_forward_pre_hook(self._guard(see)))

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._health.detach()
        self._shadow.measures = False
        self._attention.detach()

    def close(self) -> None:
        """Take away what :meth:`follow` put in, too."""
        self.detach()
        self._shadow.follow({})

    @torch.no_grad()
    def read_gradients(self) -> None:
        """Square sums of the gradients as they are now: after a backward, before clipping. Local shards where sharded."""
        for unit, parameters in self._parameters.items():
            gradients = [_local(p.grad) for p in parameters if p.grad is not None]
            if gradients:
                self._squares[unit] = nn.utils.get_total_norm(gradients).double().square()

    def collect(self, loss: float, scale: float = 1.0) -> list[float]:
        """The numbers of this rank, in the order of :attr:`columns`; :data:`NOT_MEASURED` where there is none. One copy to the
        host.

        Args:
            loss: Of the batch.
            scale: What the gradients of the first microbatch were multiplied with, beside those of its mean loss.
        """
        rows: dict[Rung, dict[tuple[str, str], Tensor]] = {
            "real": {(name, operand): row for (name, operand), row in self._health.tensors().items()},
            "shadow": self._shadow.tensors(),
        }
        products = {"real": self._products.tensors(), "shadow": self._shadow.products.tensors()}
        costs = {"real": self._products.costs(), "shadow": self._shadow.products.costs()}
        amax: dict[tuple[str, str], Tensor] = {}
        for name, looked in self._attention.collect().items():
            amax |= {(name, operand): value for operand, value in looked.amax.items()}
            for rung, operands in looked.operands.items():
                rows[rung] |= {(name, operand): row for operand, row in operands.items()}
            for rung, of_p in looked.logits.items():
                products[rung] |= {(name, "qk"): of_p, (name, "o"): looked.output[rung]}
            for rung, cost in looked.costs.items():
                costs[rung][name] = cost
        clipped = {review: review.clipped for review in self._reviews if review.state.review is review}
        parts = _to_host([amax, self._moments, self._squares, clipped, *rows.values(), *products.values(), *costs.values()])  # fmt: skip
        self._moments, self._squares = {}, {}
        found = _Found(self.columns)
        found.amax |= {where: value for where, (value,) in parts[0].items()}
        for name, moments_of in parts[1].items():
            found.outliers(self._unit_of[name], moments_of)
        for unit, (square,) in parts[2].items():
            found.signs[unit, "gradient_norm"] = square
        for review, counts in parts[3].items():
            self._see_clipped(found, review, counts)
        # An expert sees a part of the tokens.
        tokens = max((count for of_rung in parts[8:] for _, count in of_rung.values()), default=0.0)
        for damage, operand_rows, made, cost_of in zip((found.damage, found.shadow), parts[4:6], parts[6:8], parts[8:], strict=True):  # fmt: skip
            for (name, operand), values in operand_rows.items():
                found.health(damage, self._unit_of[name], name, operand, values)
            for (name, which), values in made.items():
                if which == "qk":
                    damage[name, which, "logit_noise"] = logit_noise(values)
                elif any(values[:2]) or damage is found.shadow:
                    damage[name, which, _of("product_noise", which)] = product_noise(values)
            for name, (total, _) in cost_of.items():
                if loss and math.isfinite(loss):
                    share = self.columns.costed * total * tokens / scale**2 / abs(loss)
                    damage[name, _output(self._ladders[name]), "loss_cost"] = share
        return [loss, *found.signs.values(), *found.amax.values(), *found.damage.values(), *found.shadow.values()]  # fmt: skip

    def _see_clipped(self, found: _Found, review: AmaxReview, counts: Sequence[float]) -> None:
        clipped, recurring = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        for name, ladder in self._ladders.items():
            into = found.shadow if ladder.rung else found.damage
            for tensor, slot in (ladder.module.slots or {}).items():
                if slot.state is review.state and (name, tensor, "clipped") in into:
                    octaves = clipped[slot.index] if tensor in CLIPPED else 0.0
                    into[name, tensor, "clipped"] = octaves + recurring[slot.index]
                    finer = ladder.rung and ladder.module.recipe is not None
                    if finer and review.remembers:  # what comes and goes by so much suits no scale
                        found.damage[name, tensor, "clipped"] = recurring[slot.index]

    @torch.no_grad()
    def _see(self, name: str, x: Tensor) -> None:
        if name not in self._moments and x.numel():
            flat = x.detach().reshape(-1, x.shape[-1])
            self._moments[name] = moments(flat, sample_rows(flat))


class _Found:
    """What one rank measured, by column."""

    def __init__(self, columns: Columns) -> None:
        self.signs = dict.fromkeys(columns.signs, NOT_MEASURED)
        self.amax = dict.fromkeys(columns.operands, NOT_MEASURED)
        self.damage = dict.fromkeys(columns.damage, NOT_MEASURED)
        self.shadow = dict(self.damage)

    def health(self, into: dict[tuple[str, str, str], float], unit: str, name: str, operand: str, row: list[float]) -> None:  # fmt: skip
        """One operand's row. Zeros have no level that what comes after them could rise from."""
        health = summarise(row)
        if health.amax != 0 or into is self.shadow:
            into[name, operand, _of("flushed", operand)] = health.flushed
            into[name, operand, _of("noise", operand)] = health.noise
        if operand in ("x", "q", "k", "v"):
            self.outliers(unit, row)

    def outliers(self, unit: str, row: list[float]) -> None:
        """The moments of what a block multiplies; what is outside of the blocks sticks out as it likes."""
        if unit != OUTSIDE:
            *kurtoses, _ = outliers(row)
            for signal, value in zip(OUTLIERS, kurtoses, strict=True):
                self.signs[unit, signal] = _worse(self.signs[unit, signal], value)


def _to_host(groups: Sequence[Mapping[Any, Tensor]]) -> list[dict[Any, list[float]]]:
    """The numbers of all tensors, in one copy."""
    tensors = [tensor for group in groups for tensor in group.values()]
    flat = iter(torch.cat([t.double().flatten() for t in tensors]).tolist() if tensors else [])
    return [{key: [next(flat) for _ in range(t.numel())] for key, t in group.items()} for group in groups]


def together(rows: Sequence[Sequence[float]], columns: Columns) -> Observed:
    """What all ranks observed: the worst of each, the norm of all gradients, the mean loss. What nobody measured is left out."""
    loss = sum(row[0] for row in rows) / len(rows)
    start = 1 + len(columns.signs)
    signs: dict[tuple[str, str], float] = {}
    for where, values in zip(columns.signs, zip(*(row[1:start] for row in rows), strict=True), strict=True):
        measured = [value for value in values if value != NOT_MEASURED]
        if measured:
            bad = any(math.isnan(value) for value in measured)
            value = math.sqrt(sum(measured)) if where[1] == "gradient_norm" and not bad else max(measured)
            signs[where] = math.inf if bad else value
    parts = []
    for places in (columns.operands, columns.damage, columns.damage):
        worst: dict[Any, float] = {}
        for place, values in zip(places, zip(*(row[start : start + len(places)] for row in rows), strict=True), strict=True):  # fmt: skip
            value = math.inf if any(math.isnan(v) for v in values) else max(values)
            if value != NOT_MEASURED:
                worst[place] = value
        parts.append(worst)
        start += len(places)
    # Each is as if all cost as much; those in high precision cost nothing.
    costed = max(1, columns.costed)
    real, would = (
        math.fsum(value for (*_, name), value in part.items() if name == "loss_cost") / costed
        for part in parts[1:]
    )
    return Observed(loss=loss, signs=signs, amax=parts[0], damage=parts[1], shadow=parts[2], loss_cost=real, shadow_cost=would)  # fmt: skip


def _of(signal: str, operand: str) -> str:
    """The signal's name, which is another for gradients."""
    return f"{signal}_gradient" if operand in ("dy", "do", "dx", "dw") else signal


def _damage_of(target: str, ladder: Ladder) -> list[tuple[str, str, str]]:
    found = [
        (target, operand, name)
        for operand in ladder.operands
        for name in (_of("flushed", operand), _of("noise", operand))
    ]
    if _linear(ladder):
        found += [(target, which, _of("product_noise", which)) for which in PRODUCTS]
    else:
        found += [(target, "qk", "logit_noise"), (target, "o", "product_noise")]
    found.append((target, _output(ladder), "loss_cost"))
    return [*found, *((target, tensor, "clipped") for tensor in ladder.module.slots or {})]


def _linear(ladder: Ladder) -> bool:
    return isinstance(ladder.module, FP8Linear)


def _output(ladder: Ladder) -> str:
    """What it puts out."""
    return "y" if _linear(ladder) else "o"


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _worse(a: float, b: float) -> float:
    return math.inf if math.isnan(a) or math.isnan(b) else max(a, b)
