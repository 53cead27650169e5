"""The numbers that the guard watches, and what each of them can say.

*Damage* is what quantisation does to an operand: it is the one thing that leaving FP8 ends, so it alone says which layer is sick.
*Signs* come before (kurtosis) or after it (gradient norm, loss), in healthy runs too: they raise an alarm
for a person to read, and say where to look when the loss climbs and nothing is damaged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from foundry_fp8.observe.divergence.change_point import Change, ChangePoint

__all__ = ["DAMAGE", "RULES", "SIGNS", "Rule", "Signal"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """When one number is above."""

    floor: float
    """Smaller values count as this one: below it, differences mean nothing."""
    ratio: float
    """The change that matters, as a factor, if it comes at once."""
    drift: float
    """The same if it comes slowly and lasts."""
    sick: float | None = None
    """Of damage: above this, whatever the past."""
    counted: bool = False
    """Of damage: whether it is a sum over the batches already, which alarms above ``sick`` at once. It is of batches that observations may miss, so
    that no finer recipe can be tried on it."""


DAMAGE: dict[str, Rule] = {
    "flushed": Rule(floor=5e-3, ratio=4.0, drift=4.0, sick=0.5),
    "flushed_gradient": Rule(floor=0.04, ratio=4.0, drift=4.0, sick=0.5),
    "noise": Rule(floor=1.0, ratio=4.0, drift=4.0, sick=64.0),
    "noise_gradient": Rule(floor=4.0, ratio=4.0, drift=4.0, sick=64.0),
    "product_noise": Rule(floor=1.0, ratio=4.0, drift=4.0, sick=64.0),
    "product_noise_gradient": Rule(floor=4.0, ratio=4.0, drift=4.0, sick=64.0),
    "clipped": Rule(floor=0.3, ratio=1.44, drift=1.44, sick=1.2, counted=True),
    "logit_noise": Rule(floor=0.02, ratio=4.0, drift=4.0, sick=0.3),
    "loss_cost": Rule(floor=1e-3, ratio=4.0, drift=4.0, sick=100.0),
}
"""By operand: the share of its elements that become zero (of gradients healthy runs lose some percent, and that batches differ makes more noise than FP8 does),
and what is lost of a token in units of what rounding alone takes (:class:`~foundry_fp8.observe.operand_health.Health`). Saturation damages by what it cuts off, which is in the second. By product of a linear, and by output of an attention: its error, in the same units
(:func:`~foundry_fp8.observe.product_noise.product_noise`). Under delayed scaling the octaves by which passes were clipped of late, one each at most, of
every pass (:class:`~foundry_fp8.observe.divergence.amax_review.AmaxReview`). By attention: the error of its logits
(:func:`~foundry_fp8.observe.attention_error.logit_noise`). By linear and by attention: what share of the loss rounding its operands would cost if that of all cost as
much (:func:`~foundry_fp8.observe.loss_cost.loss_cost`); what no layer is to be blamed for shows there, too, if anybody feels it."""

SIGNS: dict[str, Rule] = {
    "kurtosis": Rule(floor=16.0, ratio=5.0, drift=5.0),
    "kurtosis_flat": Rule(floor=200.0, ratio=10.0, drift=10.0),
    "gradient_norm": Rule(floor=1e-12, ratio=8.0, drift=8.0),
    "loss": Rule(floor=1e-3, ratio=1.25, drift=1.12),
}
"""By block, and the loss. Kurtosis of tokens, averaged, sees a channel that sticks out; that of all tokens together sees one token
that does."""

RULES = DAMAGE | SIGNS


class Signal:
    """One watched number with its past, in logarithms, because everything that is watched grows by factors.

    Args:
        rule: When it is above.
        like: Of damage: the signal of the same operand under a coarser recipe, whose level is as much as this may have.
    """

    def __init__(self, rule: Rule, like: Signal | None = None) -> None:
        self.rule = rule
        self.test: ChangePoint
        ceiling = None if rule.sick is None else math.log(rule.sick)
        bound = None
        if like is not None and ceiling is not None and like.test.reference is not None:
            bound = min(ceiling - math.log(rule.ratio), like.test.reference)
        change = Change(jump=math.log(rule.ratio), drift=math.log(rule.drift))
        self.test = ChangePoint(change, ceiling=ceiling, bound=bound)
        self._damage = rule.sick is not None

    @property
    def threshold(self) -> float:
        """What a value must exceed, twice in a row, to raise the alarm by itself; Inf during the warm-up."""
        reference = self.test.reference
        return math.inf if reference is None else math.exp(reference + self.test.jump)

    @property
    def suspect(self) -> bool:
        """Part of an alarm has come together."""
        return self.test.evidence > 0.5

    def sick(self, value: float) -> bool:
        """Of damage: whether it is, whatever the past."""
        return self.rule.sick is not None and self.rule.sick < value < math.inf

    def observe(self, value: float) -> bool:
        """Take one observation; true if it raises the alarm. One that is not finite does at once, and teaches nothing."""
        if not math.isfinite(value):
            return True
        if self.rule.counted:
            return self.sick(value)
        return self.test.observe(math.log(max(value, self.rule.floor)), restart=not self._damage)

    def healthy(self, value: float) -> bool:
        """Whether ``value`` is well below what would raise the alarm: half of the way, in logarithms."""
        reference = self.test.reference
        if reference is None or not math.isfinite(value):
            return False
        return math.log(max(value, self.rule.floor)) <= reference + self.test.jump / 2

    def state_dict(self) -> dict[str, Any]:
        """Numbers only."""
        return self.test.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Take back what :meth:`state_dict` gave; the names that one of both lacks: with any, it starts anew."""
        return self.test.load_state_dict(saved)
