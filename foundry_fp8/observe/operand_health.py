"""What quantisation did to one operand, and the probe that measures it on every converted linear of a model."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.linear import FP8Linear, Probe
from foundry_fp8.model_structure.names import named_modules_clean
from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.numerics.recipes import Operand

__all__ = ["Health", "HealthProbe", "measure"]


@dataclasses.dataclass(frozen=True)
class Health:
    """One operand of one linear in one batch (microbatches together).

    Attributes:
        amax: max |x|.
        scale: What the block with that amax was multiplied with (the tensor's scale where it has one).
        saturated: Share of elements beyond what rounding alone would bring to the format's maximum.
        flushed: Share of elements that were not zero and became zero.
        sqnr_db: ``20 log10(|x| / |x - Q(x)|)``, Frobenius norms; Inf if nothing was lost, NaN if something is not finite.
    """

    amax: float
    scale: float
    saturated: float
    flushed: float
    sqnr_db: float


def measure(x: Tensor, q: Quantized) -> Tensor:
    """The sums behind :class:`Health`, float32 ``[7]``: amax, scale, elements saturated, flushed, all; signal, noise.

    Args:
        x: ``[R, C]``, hp.
        q: What became of it.
    """
    x = x.detach().float()
    data = q.data.float()  # once: from FP8 this is the slow part on a CPU
    # Half a step above the maximum still rounds to it: 464 for E4M3, 61440 for E5M2.
    limit = q.fmt.max + {448.0: 16.0, 57344.0: 4096.0}.get(q.fmt.max, 0.0)
    saturated = x.abs() > q.expanded(q.scale_inv) * limit
    flushed = data.eq(0).logical_and_(x)
    noise = torch.addcmul(x, data, q.expanded(q.gemm_scale), value=-1.0)
    count = torch.full((), float(x.numel()), device=x.device)
    largest = q.scale_inv.flatten()[q.amax.flatten().argmax()]
    return torch.stack(
        [
            q.amax.max(),
            1.0 / largest,
            saturated.count_nonzero().float(),
            flushed.count_nonzero().float(),
            count,
            torch.linalg.vector_norm(x).square(),
            torch.linalg.vector_norm(noise).square(),
        ]
    )


def summarise(rows: list[list[float]]) -> Health:
    """One :class:`Health` from the :func:`measure` of each microbatch."""
    amax, scale = max(row[0] for row in rows), rows[-1][1]
    saturated, flushed, count, signal, noise = (math.fsum(row[i] for row in rows) for i in range(2, 7))
    if noise == 0:
        sqnr = math.inf
    elif signal > 0 and math.isfinite(signal) and math.isfinite(noise):
        sqnr = 10 * math.log10(signal / noise)
    else:
        sqnr = math.nan
    return Health(amax, scale, saturated / count, flushed / count, sqnr)


class _Fanout:
    """What ``FP8Linear.probe`` holds while anyone watches: it has one place, and there may be several monitors."""

    def __init__(self) -> None:
        self.listeners: list[Probe] = []

    def __call__(self, operand: Operand, x: Tensor, q: Quantized) -> None:
        for listener in self.listeners:
            listener(operand, x, q)


class HealthProbe:
    """Measures every operand that the converted linears of a model quantise, while attached.

    Args:
        model: Wrapped or not.
        guard: Wraps each hook (:meth:`foundry_fp8.callbacks.base.Monitor.guarded`).
    """

    def __init__(self, model: nn.Module, guard: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self.modules = {name: m for name, m in named_modules_clean(model) if isinstance(m, FP8Linear)}
        self._guard = guard
        self._own: dict[str, Probe] = {}
        self._rows: dict[tuple[str, Operand], list[Tensor]] = defaultdict(list)

    def attach(self) -> None:
        """Start measuring, beside whoever else does."""
        self.detach()
        for name, module in self.modules.items():
            if not isinstance(module.probe, _Fanout):
                module.probe = _Fanout()
            self._own[name] = self._guard(self._listener(name))  # type: ignore[assignment]
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

    def tensors(self) -> dict[tuple[str, Operand], list[Tensor]]:
        """What was measured since the last call, still on the device: :func:`measure` of each microbatch."""
        rows, self._rows = self._rows, defaultdict(list)
        return rows

    def collect(self) -> dict[tuple[str, Operand], Health]:
        """What was measured since the last call, by module and operand. One copy to the host."""
        rows = self.tensors()
        if not rows:
            return {}
        flat = torch.stack([row for found in rows.values() for row in found]).tolist()
        healths, start = {}, 0
        for where, found in rows.items():
            healths[where] = summarise(flat[start : start + len(found)])
            start += len(found)
        return healths

    def _listener(self, name: str) -> Callable[[Operand, Tensor, Quantized], None]:
        @torch.no_grad()
        def listen(operand: Operand, x: Tensor, q: Quantized) -> None:
            if operand != "dy" and inside_backward():  # activation checkpointing runs the same forward again
                return
            if x.numel():
                self._rows[name, operand].append(measure(x, q))

        return listen
