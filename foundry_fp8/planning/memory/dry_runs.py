"""What dry runs leave out: of blocks that are equal all but the first and the last, and the choices of routers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.dispatch_mode import TorchDispatchMode
from foundry_fp8.compat.fake_tensor import FakeTensor
from foundry_fp8.compat.pytree import tree_iter, tree_map
from foundry_fp8.model_structure.experts import expert_count

__all__ = ["EqualShares", "left_out", "repeated"]


@dataclasses.dataclass(frozen=True)
class _Like:
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, x: Tensor) -> _Like:
        return cls(x.shape, x.dtype, x.device, x.requires_grad)

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class _Block(torch.autograd.Function):
    """Outputs and gradients as a block makes them; computes nothing, keeps nothing for backward."""

    @staticmethod
    def forward(ctx: Any, outputs: list[_Like], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.inputs = [_Like.of(x) for x in inputs]
        made = tuple(like.empty() for like in outputs)
        ctx.mark_non_differentiable(
            *(x for x, like in zip(made, outputs, strict=True) if not like.requires_grad)
        )
        return made

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(x.empty() if x.requires_grad else None for x in ctx.inputs)


def repeated(kinds: Sequence[Hashable]) -> frozenset[int]:
    """Indices of the blocks that are neither the first nor the last of their kind."""
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    last = {kind: index for index, kind in enumerate(kinds)}
    return frozenset(range(len(kinds))) - {*first.values(), *last.values()}


@contextlib.contextmanager
def left_out(
    blocks: Sequence[nn.Module], kinds: Sequence[Hashable], indices: Set[int]
) -> Iterator[Sequence[nn.Module]]:
    """Within it, blocks at ``indices`` do not run: they give an output like their kind's first, and gradients without values.

    Yields:
        ``blocks``.
    """
    outputs: dict[Hashable, Any] = {}

    def replaced(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            outputs[kinds[index]] = tree_map(lambda x: _Like.of(x) if isinstance(x, Tensor) else x, out)
            return out

        def made(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            out = outputs[kinds[index]]
            tensors = [leaf for leaf in tree_iter(out) if isinstance(leaf, _Like)]
            results = iter(_Block.apply(tensors, x, *blocks[index].parameters()))
            return tree_map(lambda leaf: next(results) if isinstance(leaf, _Like) else leaf, out)

        return made if index in indices else recorded

    before = [vars(block).get("forward") for block in blocks]
    try:
        if indices:
            for index, block in enumerate(blocks):
                block.forward = replaced(index, block.forward)  # type: ignore[method-assign]
        yield blocks
    finally:
        for block, forward in zip(blocks, before, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward


class EqualShares(TorchDispatchMode):
    """Gives each expert of ``model`` the same number of tokens, where fake tensors cannot say how many were chosen.

    A model that loops over experts asks which of [choices, tokens] chose one: as many as an equal share. Of [experts], which are asked at
    all: every one.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        counts = {expert_count(name, module) for name, module in model.named_modules()} - {None}
        self.experts = max((count for count in counts if count is not None), default=1)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """``nonzero`` of fake tensors; everything else as it is."""
        if func is torch.ops.aten.nonzero.default and isinstance(args[0], FakeTensor):
            mask = args[0]
            chosen = mask.numel() if mask.dim() == 1 else -(-mask.numel() // self.experts)
            return mask.new_zeros((chosen, mask.dim()), dtype=torch.long)
        return func(*args, **(kwargs or {}))
