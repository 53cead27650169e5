"""What a fused head returns in place of logits: the losses of their rows, which only a cross-entropy may ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_fp8.activations.fused_head.row_losses import IGNORE
from foundry_fp8.compat.pytree import register_pytree_node

__all__ = ["DeferredLogits", "LogitsNotComputed", "Step", "run_steps"]

Step = tuple[str, float]
"""What a model does to its logits: ``("mul" | "div", number)`` or ``("tanh", 0.0)``."""

_STEPS: dict[str, Callable[[Any, float], Any]] = {
    "mul": lambda x, number: x * number,
    "div": lambda x, number: x / number,
    "tanh": lambda x, _: torch.tanh(x),
}


class LogitsNotComputed(RuntimeError):
    """Something asked for logits that were never made."""


class _NoAttribute(AttributeError, LogitsNotComputed):
    """So that ``hasattr`` and ``copy`` can ask."""


def run_steps(x: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """``x`` after ``steps``, none of them in place."""
    for name, number in steps:
        x = _STEPS[name](x, number)
    return x


@dataclasses.dataclass
class DeferredLogits:
    """Stands where a model and its loss expect logits ``[..., V]``.

    It takes what lies between a head and its cross-entropy: views, casts, and the steps that went into the losses already. Anything
    else is an error that names it. A dataclass, and known to torch's pytree, so that FSDP and DDP find the tensor in it that takes part
    in the backward.

    Attributes:
        losses: Of the rows, ``[N]``.
        shape: That the logits would have.
        dtype: That the logits would have.
        targets: int64 ``[N]``, from which the losses were made.
        planned: The steps that went into the losses.
        taken: Those that the model has taken so far.
        check: Called with ``targets`` and those of the cross-entropy.
    """

    losses: Tensor
    shape: torch.Size
    dtype: torch.dtype
    targets: Tensor
    planned: tuple[Step, ...]
    taken: tuple[Step, ...]
    check: Callable[[Tensor, Tensor], None]

    @property
    def device(self) -> torch.device:
        """Where the losses are."""
        return self.losses.device

    @property
    def ndim(self) -> int:
        """Of the logits."""
        return len(self.shape)

    def dim(self) -> int:
        """Of the logits."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """As a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        """The same object: losses are float32 already, keep their type, are where the head is, and leave nothing to copy."""
        return self

    float = contiguous = to

    def view(self, *shape: Any) -> DeferredLogits:
        """In another shape, as long as the words stay the last dimension."""
        seen = torch.empty(self.shape, dtype=torch.float32, device="meta").view(*shape).shape
        if not seen or seen[-1] != self.shape[-1]:
            raise self._refusal(f"views its logits {tuple(self.shape)} as {tuple(seen)}")
        return dataclasses.replace(self, shape=seen)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> DeferredLogits:
        """As a tensor's."""
        whole = torch.empty(self.shape, dtype=torch.float32, device="meta")
        return self.view(whole.flatten(start_dim, end_dim).shape)

    def _step(self, name: str, number: Any = 0.0) -> DeferredLogits:
        taken = (*self.taken, (name, number))
        if taken != self.planned[: len(taken)]:
            raise self._refusal(f"does {name}{f' by {number}' if number else ''} to its logits")
        return dataclasses.replace(self, taken=taken)

    def __mul__(self, number: Any) -> DeferredLogits:
        return self._step("mul", number)

    __rmul__ = __imul__ = __mul__

    def __truediv__(self, number: Any) -> DeferredLogits:
        return self._step("div", number)

    def __getitem__(self, index: Any) -> Any:
        raise self._refusal(f"takes a part of its logits ({index})")

    def __getattr__(self, name: str) -> Any:
        raise _NoAttribute(str(DeferredLogits._refusal(self, f"asks its logits for {name}")))

    def _refusal(self, what: str) -> LogitsNotComputed:
        return LogitsNotComputed(
            f"algorithms.fused_head: something {what}, and in training there are none: the head gives the losses of its rows instead. It "
            "takes logit_scale, logits_scaling, final_logit_softcapping and a cross-entropy; take the algorithm off for anything else."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``torch.tanh`` and ``F.cross_entropy``; no other function takes this for a tensor."""
        if func is torch.tanh:
            return args[0]._step("tanh")
        found = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        if func is F.cross_entropy:
            options = {name: value for name, value in (kwargs or {}).items() if name != "input"}
            return found._cross_entropy(*args[1:], **options)
        raise found._refusal(f"calls {getattr(func, '__name__', func)} on its logits")

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = IGNORE,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: Any = 0.0,
    ) -> Tensor:
        if weight is not None or label_smoothing or size_average is not None or reduce is not None:
            raise self._refusal("gives its cross-entropy class weights, label smoothing or an old reduction")
        if ignore_index != IGNORE:
            raise self._refusal(f"gives its cross-entropy the ignore_index {ignore_index}")
        if self.taken != self.planned:
            raise self._refusal(f"leaves out {self.planned[len(self.taken) :]}, which its configuration has,")
        if self.ndim != 2 or target.shape != self.targets.shape:
            raise self._refusal(f"asks for the loss of {tuple(target.shape)} targets and {tuple(self.shape)}")
        self.check(self.targets, target)
        # One column and torch's own reduction: the sum has its order of additions.
        column = torch.zeros_like(self.targets).masked_fill_(self.targets == IGNORE, -1)
        return F.nll_loss(-self.losses[:, None], column, ignore_index=-1, reduction=reduction)


register_pytree_node(
    DeferredLogits,
    lambda x: ([x.losses], x),
    lambda leaves, x: dataclasses.replace(x, losses=next(iter(leaves))),
)
