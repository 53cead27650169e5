"""What transformers 5 keeps private about modules of experts that its ``use_experts_implementation`` has decorated.

A module without these names is one of another release: its experts stay in high precision, by name.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

__all__ = ["gated", "is_decorated", "run_own_forward"]


def is_decorated(module: nn.Module) -> bool:
    """Whether ``module`` has the decorator's names, and its experts are not spread over ranks."""
    names = hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
    return names and not getattr(module, "_is_expert_parallel", True)


def gated(module: Any, gate_up: Tensor) -> Tensor:
    """``[rows, 2 * ffn]`` -> ``[rows, ffn]``: the activation of the model."""
    y: Tensor = module._apply_gate(gate_up)
    return y


def run_own_forward(module: Any) -> None:
    """Have ``module`` run the forward of its class, not ``torch._grouped_mm``, which takes no float64."""
    module.config = copy.copy(module.config)
    vars(module.config)["_experts_implementation_internal"] = "eager"
