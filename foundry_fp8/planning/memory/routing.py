"""Routing of a mixture of experts without values, for dry runs."""

from __future__ import annotations

from typing import Any

import torch

from foundry_fp8.compat.dispatch_mode import TorchDispatchMode
from foundry_fp8.compat.fake_tensor import FakeTensor
from foundry_fp8.model_structure.experts import expert_count

__all__ = ["EqualShares"]


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
