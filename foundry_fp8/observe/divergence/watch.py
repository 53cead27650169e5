"""What the guard measures on one rank in a due batch, unit by unit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.model_structure.blocks import block_index_of, transformer_blocks
from foundry_fp8.model_structure.names import clean_name, named_modules_clean
from foundry_fp8.numerics.recipes import Operand
from foundry_fp8.observe.divergence.ladder import OUTSIDE
from foundry_fp8.observe.kurtosis import kurtosis_per_token, row_sums
from foundry_fp8.observe.operand_health import HealthProbe, summarise

__all__ = ["LAYER_SIGNALS", "Watch"]

LAYER_SIGNALS = ("kurtosis", "saturated", "flushed", "gradient_norm")


class Watch:
    """Measures, between :meth:`attach` and :meth:`collect`, the kurtosis of what the linears of each block multiply, the
    health of the FP8 operands, and the norm of the gradients.

    Args:
        model: Wrapped or not.
        guard: Wraps each hook.

    Attributes:
        amax: The largest amax of each FP8 operand in the batch that was collected last.
    """

    def __init__(self, model: nn.Module, guard: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        blocks = [(clean_name(name), block) for name, block in transformer_blocks(model)]
        self.units = [f"layer_{i:03d}" for i in range(len(blocks))] + [OUTSIDE]
        self._model = model
        self._guard = guard
        self.amax: dict[tuple[str, Operand], float] = {}
        self._health = HealthProbe(model, guard)
        self._linears: list[tuple[str, nn.Module]] = []
        self._parameters: dict[str, list[nn.Parameter]] = defaultdict(list)
        self._unit_of: dict[str, str] = {}
        for name, module in named_modules_clean(model):
            layer = block_index_of(name, blocks)
            unit = OUTSIDE if layer is None else f"layer_{layer:03d}"
            self._unit_of[name] = unit
            self._parameters[unit] += list(module.parameters(recurse=False))
            if isinstance(module, nn.Linear) and layer is not None:
                self._linears.append((unit, module))
        self._handles: list[Any] = []
        self._kurtosis: list[tuple[str, Tensor]] = []
        self._squares: dict[str, Tensor] = {}
        self._last: tuple[int, int] | None = None

    def attach(self) -> None:
        """Put the hooks in."""
        self.detach()
        self._health.attach()
        for unit, module in self._linears:

            def see(module: nn.Module, args: Any, unit: str = unit) -> None:
                if not inside_backward() and args and isinstance(args[0], Tensor):
                    self._see(unit, args[0])

            self._handles.append(module.register_forward_pre_hook(self._guard(see)))

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._health.detach()

    @torch.no_grad()
    def read_gradients(self) -> None:
        """Square sums of the gradients as they are now: after a backward, before clipping. Local shards where sharded."""
        for unit, parameters in self._parameters.items():
            gradients = [_local(p.grad) for p in parameters if p.grad is not None]
            if gradients:
                self._squares[unit] = nn.utils.get_total_norm(gradients).float().square()

    def collect(self) -> dict[str, list[float]]:
        """``{unit: [kurtosis, saturated, flushed, sum of squared gradients]}``, the worst of the unit. One copy to the host."""
        healths = self._health.tensors()
        kurtosis, self._kurtosis = self._kurtosis, []
        squares, self._squares = self._squares, {}
        tensors = [k for _, k in kurtosis] + list(squares.values())
        tensors += [row for rows in healths.values() for row in rows]
        found = {unit: [0.0, 0.0, 0.0, 0.0] for unit in self.units}
        self.amax = {}
        if not tensors:
            return found
        values = iter(torch.cat([tensor.flatten() for tensor in tensors]).tolist())
        for unit, _ in kurtosis:
            found[unit][0] = _worse(found[unit][0], next(values))
        for unit in squares:
            found[unit][3] = next(values)
        for (name, operand), rows in healths.items():
            health = summarise([[next(values) for _ in row] for row in rows])
            self.amax[name, operand] = health.amax
            mine = found[self._unit_of[name]]
            if (
                operand != "dy"
            ):  # gradients vary from batch to batch, so a delayed scale clips some in healthy runs
                mine[1] = _worse(mine[1], health.saturated)
            mine[2] = _worse(mine[2], health.flushed)
        return found

    @torch.no_grad()
    def _see(self, unit: str, x: Tensor) -> None:
        same = (x.data_ptr(), x.numel())
        if same == self._last or not x.numel():  # q, k and v projections read one tensor
            return
        self._last = same
        self._kurtosis.append((unit, kurtosis_per_token(*row_sums(x, max(x.dim() - 1, 1)))))


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _worse(a: float, b: float) -> float:
    return math.inf if math.isnan(a) or math.isnan(b) else max(a, b)
