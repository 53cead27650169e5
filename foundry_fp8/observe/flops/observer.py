"""One batch, watched: which layers run again in the backward pass, and in what precision.

Converted layers write a ledger. For the others (heads, skipped layers, attention, every layer of a bf16 run) this puts
forward hooks on them for one batch and takes them away again, so that later batches pay nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.compat.selective_checkpoint import cached_results
from foundry_fp8.layers.dtensor import own_share

__all__ = ["Observed", "Observer"]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp32"}


@dataclasses.dataclass
class Observed:
    """What one layer did in one batch.

    Attributes:
        calls: First forwards.
        recomputed: Forwards that activation checkpointing ran again, GEMM and all.
        dgrad: Its input needed a gradient.
        backward: Its output needed one.
        precision: Of its output.
        share: Of its GEMMs, that this rank computes: less than 1 where tensor parallelism shards its weights, an attention's heads.
    """

    calls: int = 0
    recomputed: int = 0
    dgrad: bool = False
    backward: bool = False
    precision: str = "fp32"
    share: float = 1.0

    @property
    def recompute_ratio(self) -> float:
        """Recomputed forwards for each first forward."""
        return self.recomputed / self.calls if self.calls else 0.0


class Observer:
    """Watches the named modules from :meth:`attach` to :meth:`detach`.

    ``modules`` are ``(name, module, operators that are its GEMMs)``.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module, tuple[str, ...]]],
        guard: Callable[[Callable[..., None]], Callable[..., None]],
    ) -> None:
        self.modules = list(modules)
        self.guard = guard
        self.observed: dict[str, Observed] = {}
        self._handles: list[Any] = []
        self._cached: list[tuple[nn.Module, int]] = []

    def attach(self) -> None:
        """Hang the hooks in."""
        for name, module, operators in self.modules:
            seen = self.observed[name] = Observed()
            before = functools.partial(self._ask, seen, operators)
            after = functools.partial(self._see, seen, operators)
            self._handles.append(module.register_forward_pre_hook(self.guard(before)))
            self._handles.append(module.register_forward_hook(self.guard(after), with_kwargs=True))

    def detach(self) -> None:
        """Take the hooks away; what was observed stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _ask(self, seen: Observed, operators: tuple[str, ...], module: nn.Module, args: Any) -> None:
        if inside_backward():
            self._cached.append((module, cached_results(operators)))
        # Now: FSDP2 has gathered its parameters, and those of tensor parallelism alone are DTensors.
        if not seen.calls:
            weights = (p for p in module.parameters() if p.dim() > 1)
            seen.share = min(map(own_share, weights), default=1.0)

    def _see(
        self, seen: Observed, operators: tuple[str, ...], module: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        outputs = output if isinstance(output, tuple | list) else [output]
        first = next(filter(_is_tensor, outputs), None)
        if first is None:
            return
        if inside_backward():
            while self._cached:  # a forward that stopped early (checkpointing may) leaves its entry behind
                owner, before = self._cached.pop()
                if owner is module:
                    seen.recomputed += cached_results(operators) >= before
                    break
        else:
            seen.calls += 1
            fp8 = getattr(module, "fp8", False) is True
            seen.precision = "fp8" if fp8 else _NAMES.get(first.dtype, "fp32")
        # Also in a recompute: under reentrant checkpointing only that one builds a graph.
        seen.dgrad |= any(_is_tensor(t) and t.requires_grad for t in (*args, *kwargs.values()))
        seen.backward |= first.requires_grad


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
