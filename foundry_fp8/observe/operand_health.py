"""What quantisation did to one operand, and the probe that measures it on every converted linear of a model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.names import named_modules_clean
from foundry_fp8.numerics.formats import Float8Format
from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.observe.loss_cost import Error, loss_cost
from foundry_fp8.observe.operand_stats import FIELDS, Sample, quantisation, rounding_noise, sample_rows
from foundry_fp8.observe.product_noise import Factor, Product, columns_of, judge, product, rows_of, tokens_of

__all__ = [
    "ATTENTION",
    "LINEAR",
    "Health",
    "HealthProbe",
    "Measured",
    "Products",
    "Seen",
    "measure",
    "outliers",
    "summarise",
    "wgrad_in_fp8",
    "with_format",
]


SHARED = 0.25
"""What tokens may differ in, of the energy, before the loss counts against that alone. Activations, gradients and weights of
runs that are well share a part, too."""


@dataclasses.dataclass(frozen=True)
class Health:
    """One operand of one linear in one due batch.

    Attributes:
        amax: max |x|.
        scale: What the block with that amax was multiplied with (the tensor's scale where it has one).
        saturated: Share of elements beyond what rounding alone would bring to the format's maximum.
        flushed: Share of elements that were not zero and became zero.
        sqnr_db: ``20 log10(|x| / |x - Q(x)|)``, Frobenius norms; Inf if nothing was lost, NaN if something is not finite.
        noise: The mean over tokens of ``|x - Q(x)|^2 / |x|^2``, over what rounding alone makes of it
            (:func:`~foundry_fp8.observe.operand_stats.rounding_noise`): about 1 where a token keeps what the format can hold of
            it, 1 / rounding (1420 for E4M3, 355 for E5M2) where nothing is left of any. One token that is lost shows here and
            not in ``sqnr_db``, if another is much larger. A few large channels that are the same on all tokens are no content: their
            rounding alone may cost all that tokens differ in, so the loss counts against what is left without them. Nor is what all
            channels share on all tokens, where it is more than three quarters of the energy (:data:`SHARED`).
        kurtosis: The mean over tokens of ``C sum(x^4) / sum(x^2)^2``.
        kurtosis_flat: The same of all elements together.
        peak: ``amax`` over the root mean square.
    """

    amax: float
    scale: float
    saturated: float
    flushed: float
    sqnr_db: float
    noise: float
    kurtosis: float
    kurtosis_flat: float
    peak: float


def measure(x: Tensor, q: Quantized) -> Tensor:
    """The sums behind :class:`Health`, float64: those of :func:`~foundry_fp8.observe.operand_stats.quantisation`, and the
    rounding noise of the format.

    Args:
        x: ``[R, C]``, hp.
        q: What became of it.
    """
    return with_format(quantisation(x, q, sample_rows(x)), q.fmt)


def with_format(sums: Tensor, fmt: Float8Format) -> Tensor:
    """``sums`` and the rounding noise of ``fmt`` behind them."""
    return torch.cat([sums, sums.new_full((1,), rounding_noise(fmt))])


def summarise(row: Sequence[float]) -> Health:
    """The :class:`Health` from one :func:`measure`."""
    *sums, rounding = row
    of = dict(zip(FIELDS, sums, strict=True))
    signal, error, elements = of["s2"], of["error"], of["elements"]
    if error == 0:
        sqnr = math.inf
    elif signal > 0 and math.isfinite(signal) and math.isfinite(error):
        sqnr = 10 * math.log10(signal / error)
    else:
        sqnr = math.nan
    lost = _share(of["relative_error"], of["tokens"])
    content = min(signal - of["constant"], (signal - of["shared"]) / SHARED)
    if content < signal:
        lost = min(1.0, lost * signal / max(content, 1e-9 * signal))
    return Health(
        of["amax"],
        of["scale"],
        of["saturated"] / elements,
        of["flushed"] / elements,
        sqnr,
        lost / rounding,
        *outliers(sums),
    )


def outliers(sums: Sequence[float]) -> tuple[float, float, float]:
    """``kurtosis``, ``kurtosis_flat`` and ``peak`` from :func:`~foundry_fp8.observe.operand_stats.moments`."""
    amax, tokens, elements, s2, s4, kurtosis = sums[:6]
    square = _share(s2, elements)
    return (
        _share(kurtosis, tokens),
        _share(_share(s4, elements), square * square),
        _share(amax, math.sqrt(square) if square >= 0 else math.nan),
    )


def _share(part: float, whole: float) -> float:
    """0 of a tensor of zeros."""
    return 0.0 if whole == 0 else part / whole


Measured = Literal["x", "w", "dy", "q", "k", "v", "do"]
LINEAR: tuple[Measured, ...] = ("x", "w", "dy")
ATTENTION: tuple[Measured, ...] = ("q", "k", "v", "do")
"""The operands of attention that its probe shows whole; S and dP come in blocks, where they are shown at all."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """One operand as it was quantised; what is asked of it is computed once.

    Attributes:
        x: ``[R, C]``, hp; or the sampled rows of it.
        q: What became of it.
        of: Which rows of the operand the sampled ones are, if ``x`` is those alone.
        whole: Then, the operand.
    """

    x: Tensor
    q: Quantized
    of: Sample | None = None
    whole: Tensor | None = None

    @functools.cached_property
    def sample(self) -> Sample:
        """Which rows of ``x`` are looked at."""
        return sample_rows(self.x) if self.of is None else dataclasses.replace(self.of, rows=None)

    @property
    def places(self) -> Sample:
        """The same, of the operand."""
        return self.sample if self.of is None else self.of

    @property
    def operand(self) -> Tensor:
        """All of it, hp."""
        return self.x if self.whole is None else self.whole

    @functools.cached_property
    def row(self) -> Tensor:
        """:func:`measure` of it."""
        return with_format(quantisation(self.x, self.q, self.sample), self.q.fmt)

    @property
    def rows(self) -> Factor:
        """For a product that sums over columns."""
        return rows_of(self.x, self.q, self.sample)

    @property
    def columns(self) -> Factor:
        """For a product that sums over rows; of a whole operand."""
        return columns_of(self.x, self.q)

    @property
    def tokens(self) -> Factor:
        """For the product that sums over tokens."""
        return tokens_of(self.operand, self.q)


TOGETHER = 64
"""Products of one shape that wait before they are judged: together they take as many operations as one, and each waits with 130 KB."""


class Products:
    """The products of linears from their operands, in the order in which these come: x, w, dy; and what rounding them costs of the loss."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], Factor] = {}
        self._tokens: dict[str, Sample] = {}
        self._errors: dict[str, Error] = {}
        self._costs: dict[str, Tensor] = {}
        self._waiting: dict[tuple[Any, ...], dict[tuple[str, str], Product]] = {}
        self._rows: dict[tuple[str, str], Tensor] = {}

    def take(self, name: str, operand: str, seen: Seen, *, wgrad: bool) -> None:
        """The operand of one linear; products are made of it and of those before.

        Args:
            name: The linear's.
            operand: In the order in which they come.
            seen: What was quantised.
            wgrad: Whether FP8 makes dW of them.
        """
        if operand == "x":
            self._before[name, "y"] = seen.rows
            self._tokens[name] = seen.places
            if wgrad:
                self._before[name, "dw"] = seen.tokens
        elif operand == "w":
            if (x := self._before.pop((name, "y"), None)) is not None:
                y = product(x, seen.rows)
                self._keep((name, "y"), y)
                self._errors[name] = Error(y.error * y.largest, self._tokens.pop(name), seen.places)
            self._before[name, "dx"] = seen.columns
        else:
            if (error := self._errors.pop(name, None)) is not None:
                self._costs[name] = loss_cost(error, seen.operand)
            if (w := self._before.pop((name, "dx"), None)) is not None:
                self._keep((name, "dx"), product(seen.rows, w))
            if (x := self._before.pop((name, "dw"), None)) is not None:
                self._keep((name, "dw"), product(seen.tokens, x, of_tokens=False))

    def _keep(self, where: tuple[str, str], made: Product) -> None:
        waiting = self._waiting.setdefault(made.kind, {})
        waiting[where] = made
        if len(waiting) == TOGETHER:
            self._judge(made.kind)

    def _judge(self, kind: tuple[Any, ...]) -> None:
        waiting = self._waiting.pop(kind)
        self._rows |= zip(waiting, judge(list(waiting.values())), strict=True)

    def tensors(self) -> dict[tuple[str, str], Tensor]:
        """What was made since the last call, still on the device, by linear and product: ``y``, ``dx``, ``dw``."""
        self._before.clear()
        for kind in list(self._waiting):
            self._judge(kind)
        rows, self._rows = self._rows, {}
        return rows

    def costs(self) -> dict[str, Tensor]:
        """What was found since the last call, by linear: :func:`~foundry_fp8.observe.loss_cost.loss_cost`."""
        self._tokens.clear()
        self._errors.clear()
        costs, self._costs = self._costs, {}
        return costs


def wgrad_in_fp8(module: FP8Linear) -> bool:
    """Whether a linear that runs FP8 makes its weight's gradient in FP8."""
    return module.wgrad == "fp8" and module.weight.requires_grad


class _Fanout:
    """What ``FP8Linear.probe`` holds while anyone watches: an operand is read once, however many monitors are told."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []

    @torch.no_grad()
    def __call__(self, operand: Measured, x: Tensor, q: Quantized) -> None:
        if (
            operand not in ("dy", "do") and inside_backward()
        ):  # activation checkpointing runs the same forward again
            return
        listeners = [listener for listener in self.listeners if x.numel() and listener.wants(operand)]
        seen = Seen(x, q)
        for listener in listeners:
            listener.take(operand, seen)


class Listener:
    """One monitor's ear at one linear: what the first microbatch of a due batch brought.

    Args:
        take: Given each operand and its name.
    """

    def __init__(self, take: Callable[[Measured, Seen], None]) -> None:
        self._take = take
        self._heard: set[Measured] = set()

    def wants(self, operand: Measured) -> bool:
        """Not heard yet."""
        return operand not in self._heard

    def take(self, operand: Measured, seen: Seen) -> None:
        """Hear it."""
        self._heard.add(operand)
        self._take(operand, seen)


class HealthProbe:
    """Measures every operand that the converted linears of a model quantise, while attached, in their first microbatch.

    Args:
        model: Wrapped or not.
        guard: Wraps each hook (:meth:`foundry_fp8.callbacks.base.Monitor.guarded`).
        attention: Also of its FP8 attentions what is quantised whole: :data:`ATTENTION`.
        products: Also given the operands.
    """

    def __init__(
        self,
        model: nn.Module,
        guard: Callable[[Callable[..., None]], Callable[..., None]],
        *,
        attention: bool = False,
        products: Products | None = None,
    ) -> None:
        self._products = products
        self.modules: dict[str, FP8Linear | FP8DotProductAttention] = {
            name: m
            for name, m in named_modules_clean(model)
            if isinstance(m, FP8Linear) or (attention and isinstance(m, FP8DotProductAttention))
        }
        self._guard = guard
        self._own: dict[str, Listener] = {}
        self._rows: dict[tuple[str, Measured], Tensor] = {}

    def attach(self, only: str | None = None) -> None:
        """Start measuring, beside whoever else does: all modules, or only that of one name."""
        self.detach()
        for name in self.modules if only is None else (only,):
            module = self.modules[name]
            if not isinstance(module.probe, _Fanout):
                module.probe = _Fanout()
            self._own[name] = Listener(self._guard(functools.partial(self._keep, name)))
            module.probe.listeners.append(self._own[name])

    def detach(self) -> None:
        """Stop measuring; what was measured stays."""
        for name, listener in self._own.items():
            module = self.modules[name]
            if isinstance(module.probe, _Fanout):
                module.probe.listeners.remove(listener)
                if not module.probe.listeners:
                    module.probe = None
        self._own.clear()

    def tensors(self) -> dict[tuple[str, Measured], Tensor]:
        """What was measured since the last call, still on the device: :func:`measure` of each operand."""
        rows, self._rows = self._rows, {}
        return rows

    def collect(self) -> dict[tuple[str, Measured], Health]:
        """What was measured since the last call, by module and operand. One copy to the host."""
        rows = self.tensors()
        if not rows:
            return {}
        return dict(zip(rows, map(summarise, torch.stack(list(rows.values())).tolist()), strict=True))

    def _keep(self, name: str, operand: Measured, seen: Seen) -> None:
        if operand in (*LINEAR, *ATTENTION):
            self._rows[name, operand] = seen.row
            module = self.modules[name]
            if self._products is not None and isinstance(module, FP8Linear):
                self._products.take(name, operand, seen, wgrad=wgrad_in_fp8(module))
