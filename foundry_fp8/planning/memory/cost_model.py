"""Seconds without a machine to measure on: the arithmetic and the memory traffic of every operator."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from foundry_fp8.compat.dispatch_mode import TorchDispatchMode
from foundry_fp8.compat.pytree import tree_iter
from foundry_fp8.layers.product_operators import flop_formulas

__all__ = ["CostModel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds of operators that are counted, not run.

    The defaults are an H100 SXM's dense bfloat16 peak and HBM3 bandwidth (NVIDIA's data sheet), at the fractions that
    large matmuls and copies reach in practice by common experience: a ranking of options, not a forecast. Products of FP8
    take half the seconds of bfloat16's, as on that data sheet.
    """

    flops_per_second: float = 0.6 * 989e12
    bytes_per_second: float = 0.8 * 3.35e12
    gpu: str = "H100"
    """Whose way to host memory it has."""

    @contextlib.contextmanager
    def counting(self) -> Iterator[Callable[[], float]]:
        """Within it operators are counted; what it gives has their seconds."""
        flops = FlopCounterMode(display=False, custom_mapping=flop_formulas())
        with flops, _Traffic() as traffic:
            yield (
                lambda: (
                    flops.get_total_flops() / self.flops_per_second + traffic.bytes / self.bytes_per_second
                )
            )


class _Traffic(TorchDispatchMode):
    """Bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace != "prim":  # such as prim::device, which only asks
            tensors = [x for x in tree_iter((args, kwargs, out)) if isinstance(x, Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in (*tensors, *_read_again(func, args)))
        return out


def _read_again(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """What a cast measures first: its input, where it is given neither a scale nor an amax."""
    if func.name() != "foundry_fp8::quantize_tensorwise":
        return []
    given = args[7], args[8], *args[15:16]  # scale, known_amax, constant
    return [args[0]] if all(value is None for value in given) else []
