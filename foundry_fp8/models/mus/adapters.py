"""LoRA on µnit-scaled linears: merging has to divide by the output multiplier, which the base layer applies."""

from __future__ import annotations

from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor

from foundry_fp8.layers.unit_linear import FP8UnitLinear, UnitLinear

__all__ = ["UnitLoraLinear", "use_unit_lora"]


class UnitLoraLinear(Linear):
    """``alpha x W^T + s (x A^T) B^T``; merged, ``alpha x (W + s/alpha B A)^T``."""

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What merging adds to the weight."""
        delta: Tensor = super().get_delta_weight(adapter)
        base = self.get_base_layer()
        assert isinstance(base, UnitLinear | FP8UnitLinear)
        return delta / base.output_multiplier


def use_unit_lora(config: LoraConfig) -> LoraConfig:
    """``config``, set to make :class:`UnitLoraLinear` of µnit-scaled linears. Without it a merge is wrong by 1/alpha.

    Example:
        >>> model = get_peft_model(model, use_unit_lora(LoraConfig(target_modules=["qkv_proj"])))
    """
    config._register_custom_module({UnitLinear: UnitLoraLinear})
    return config
