"""Seconds without a machine to measure on: the arithmetic and the memory traffic of every operator."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from foundry_fp8.compat.dispatch_mode import TorchDispatchMode
from foundry_fp8.compat.fake_tensor import FLASH_ATTENTION
from foundry_fp8.compat.pytree import tree_iter

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
        flops = FlopCounterMode(display=False, custom_mapping=_formulas())
        with flops, _Traffic() as traffic:
            yield (
                lambda: (
                    flops.get_total_flops() / self.flops_per_second + traffic.bytes / self.bytes_per_second
                )
            )


def _formulas() -> dict[Any, Callable[..., int]]:
    """FLOPs that torch does not count. The native backend's are at bfloat16's rate, which is half of FP8's."""
    own, (flash, flash_backward) = torch.ops.foundry_fp8, FLASH_ATTENTION
    formulas: dict[Any, Callable[..., int]] = {
        torch.ops.aten._scaled_mm: lambda a, b, *_, **__: a[0] * a[1] * b[1],
        # S and PV; in backward S, dP, dQ, dK and dV.
        flash: lambda q, k, *_, **__: 4 * _scores(q, k),
        flash_backward: lambda _, q, k, *__, **___: 10 * _scores(q, k),
    }
    for name, formula in (
        ("blockwise_gemm", lambda a, _, b, *__, **___: a[0] * a[1] * b[0]),
        ("attention_forward", lambda *args, **_: 2 * _native_scores(args[9])),
        # Two kernels compute S and dP each; without a scale of dP, dQ and dK are bfloat16's.
        (
            "attention_backward",
            lambda *args, **_: (9 if args[13] is None else 7) * _native_scores(args[15]),
        ),
    ):
        if hasattr(own, name):  # once its module is imported
            formulas[getattr(own, name)] = formula
    return formulas


def _scores(q: Sequence[int], k: Sequence[int]) -> int:
    """Multiplications of ``Q K^T``; nothing is masked, as in torch's own formulas."""
    batch, heads, queries, head_dim = q
    return batch * heads * queries * k[2] * head_dim


def _native_scores(sizes: Sequence[int]) -> int:
    batch, heads, _, queries, keys, head_dim = sizes
    return batch * heads * queries * keys * head_dim


class _Traffic(TorchDispatchMode):
    """Bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace != "prim":  # such as prim::device, which only asks
            tensors = [x for x in tree_iter((args, kwargs, out)) if isinstance(x, Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return out
