"""The µnit-scaled decoder as an LLM Foundry model: ``model: {name: mus_causal_lm, size: 1b}``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foundry_fp8.models.fog.causal_lm import ComposerFogCausalLM
from foundry_fp8.models.mus.config import MusConfig
from foundry_fp8.models.mus.modeling import MusForCausalLM

if TYPE_CHECKING:
    from peft import PeftConfig

__all__ = ["ComposerMusCausalLM"]


class ComposerMusCausalLM(ComposerFogCausalLM):
    """A :class:`MusForCausalLM`; arguments as :class:`ComposerFogCausalLM`, with the keys of :class:`MusConfig`."""

    yaml_name = "mus_causal_lm"
    config_type = MusConfig
    model_type = MusForCausalLM

    @staticmethod
    def get_peft_config(peft_config_dict: dict[str, Any]) -> PeftConfig:
        """As LLM Foundry's, with LoRA layers that merge rightly."""
        from foundry_fp8.models.mus.adapters import use_unit_lora

        return use_unit_lora(ComposerFogCausalLM.get_peft_config(peft_config_dict))
