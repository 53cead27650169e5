"""A published FP8 checkpoint as an LLM Foundry model: ``model: {name: hf_fp8_causal_lm, pretrained_model_name_or_path: Qwen3-8B-FP8}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from llmfoundry.models.hf import ComposerHFCausalLM
from transformers import PreTrainedTokenizerBase

from foundry_fp8.config import ConfigError, Text, check_arguments
from foundry_fp8.export.load import load_fp8

__all__ = ["ComposerFP8CausalLM"]


class ComposerFP8CausalLM(ComposerHFCausalLM):
    """``hf_causal_lm`` whose weights :func:`~foundry_fp8.export.load.load_fp8` reads, so that transformers needs no GPU and casts nothing.

    Args:
        tokenizer: The tokenizer.
        pretrained_model_name_or_path: A folder on this disk, which every rank reads.
        peft_config: With it the linears keep their codes; without it they train, as the values that the codes stand for.
        init_device: ``cpu``, where each rank reads.
        pretrained: ``true``.
        options: Further arguments of ``hf_causal_lm``.

    Raises:
        ConfigError: A key that it does not have, or what ``load_fp8`` raises.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        pretrained_model_name_or_path: Text,
        peft_config: Mapping[str, Any] | None = None,
        init_device: Literal["cpu"] = "cpu",
        pretrained: Literal[True] = True,
        **options: Any,
    ) -> None:
        check_arguments(ComposerFP8CausalLM, locals(), "model")
        for key in ("pretrained_lora_id_or_path", "load_in_8bit"):
            if options.get(key):
                raise ConfigError(f"model.{key}: hf_fp8_causal_lm does not take it. Remove the key.")
        self.folder, self.frozen = pretrained_model_name_or_path, peft_config is not None
        super().__init__(
            tokenizer, pretrained_model_name_or_path, pretrained=False, peft_config=peft_config, **options
        )

    @classmethod
    def build_inner_model(cls, *args: Any, **options: Any) -> Any:
        """As ``hf_causal_lm``'s, without memory for weights."""
        return super().build_inner_model(*args, **{**options, "init_device": "meta"})

    def transform_model(self, model: Any) -> Any:
        """Read the weights, before adapters are put beside them."""
        load_fp8(self.folder, model.requires_grad_(not self.frozen))
        return model
