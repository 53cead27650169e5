"""FOG and its baselines as an LLM Foundry model: ``model: {name: fog_causal_lm, variant: fog-max, size: 390m}``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from composer.models.huggingface import HuggingFaceModel, peft_installed
from llmfoundry.models.hf import ComposerHFCausalLM
from llmfoundry.models.hf.hf_fsdp import hf_get_init_device
from llmfoundry.models.utils import init_empty_weights
from transformers import PreTrainedTokenizerBase

from foundry_fp8.config import ConfigError, Names, Text, check_arguments, nearest
from foundry_fp8.models.fog.config import Architecture, FogConfig
from foundry_fp8.models.fog.modeling import FogForCausalLM

__all__ = ["ComposerFogCausalLM"]


class ComposerFogCausalLM(ComposerHFCausalLM):
    """A :class:`FogForCausalLM` from scratch, with LLM Foundry's metrics, FSDP wrapping and meta initialisation.

    A model that was saved with ``save_pretrained`` (or by ``hf_checkpointer``) loads as ``name: hf_causal_lm`` once
    ``foundry_fp8.models.fog`` is imported, or here with ``pretrained_model_name_or_path``.

    Args:
        tokenizer: The tokenizer.
        pretrained_model_name_or_path: A saved model; then no key of :class:`FogConfig` may be given.
        init_device: ``cpu``, ``meta`` or ``mixed``.
        attn_implementation: ``sdpa`` or ``eager``. FP8 attention is ``algorithms: {fp8: {attention: true}}``.
        peft_config: As for ``hf_causal_lm``.
        use_train_metrics: Whether to compute metrics in training.
        additional_train_metrics: Names of more metrics.
        additional_eval_metrics: Names of more metrics.
        should_save_peft_only: Save only the adapter, where there is one.
        allow_embedding_resizing: Grow the embedding to the tokenizer's vocabulary.
        config: Keys of :class:`FogConfig`. ``vocab_size`` defaults to the tokenizer's, rounded up to 128.

    Raises:
        ConfigError: An unknown key, or what FogConfig raises.
    """

    yaml_name: ClassVar[str] = "fog_causal_lm"
    config_type: ClassVar[Any] = FogConfig
    model_type: ClassVar[Any] = FogForCausalLM

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        pretrained_model_name_or_path: Text | None = None,
        init_device: Literal["cpu", "meta", "mixed"] = "cpu",
        attn_implementation: Literal["sdpa", "eager"] = "sdpa",
        peft_config: Mapping[str, Any] | None = None,
        use_train_metrics: bool = True,
        additional_train_metrics: Names | None = None,
        additional_eval_metrics: Names | None = None,
        should_save_peft_only: bool = True,
        allow_embedding_resizing: bool = False,
        **config: Any,
    ) -> None:
        check_arguments(ComposerFogCausalLM, locals(), "model")
        keys = self.config_keys()
        for key in config:
            if key not in keys:
                raise ConfigError(
                    f"model.{key}: unknown key. {self.yaml_name} takes {', '.join(keys)}.{nearest(key, keys)}"
                )
        if pretrained_model_name_or_path is not None:
            if config:
                raise ConfigError(
                    f"model.{next(iter(config))}: a pretrained model brings its own configuration. "
                    "Remove the key, or pretrained_model_name_or_path."
                )
            model = self.model_type.from_pretrained(
                pretrained_model_name_or_path, attn_implementation=attn_implementation
            )
        else:
            model = self._build(config, tokenizer, init_device, attn_implementation)
        model.config.use_cache = False  # training keeps no cache; generate() asks for one itself
        if peft_config is not None and not peft_installed:
            raise RuntimeError("model.peft_config: needs the package peft. Install llm-foundry[peft].")
        metrics, eval_metrics = self.build_metrics(
            use_train_metrics=use_train_metrics,
            additional_train_metrics=list(additional_train_metrics or ()),
            additional_eval_metrics=list(additional_eval_metrics or ()),
        )
        # Past ComposerHFCausalLM's constructor, which builds from the Hub; everything else of it is used.
        HuggingFaceModel.__init__(
            self,
            model=model,
            tokenizer=tokenizer,  # type: ignore[arg-type]
            use_logits=True,
            metrics=metrics,
            eval_metrics=eval_metrics,
            shift_labels=True,
            allow_embedding_resizing=allow_embedding_resizing,
            peft_config=None if peft_config is None else self.get_peft_config(dict(peft_config)),
            should_save_peft_only=should_save_peft_only,
        )
        self.prepare_inner_model(self.model, init_device)

    @classmethod
    def config_keys(cls) -> tuple[str, ...]:
        """What a YAML may say of the configuration."""
        named = inspect.signature(cls.config_type.__init__).parameters
        own = tuple(name for name in named if name not in ("self", "kwargs"))
        return (*own, *Architecture.__dataclass_fields__) if cls.config_type is FogConfig else own

    @classmethod
    def _build(
        cls,
        config: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase | None,
        init_device: str,
        attn_implementation: str,
    ) -> FogForCausalLM:
        if "vocab_size" not in config and tokenizer is not None:
            config["vocab_size"] = -(-len(tokenizer) // 128) * 128
        if tokenizer is not None:
            ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
            config.update({key: value for key, value in ids.items() if value is not None})
        made = cls.config_type(**config)
        made._attn_implementation = attn_implementation
        device = hf_get_init_device(init_device)
        if device == "cpu":
            return cls.model_type(made)
        with init_empty_weights(include_buffers=False):
            model = cls.model_type(made)
        if made.tie_word_embeddings:
            # Past tie_weights(): within LLM Foundry's meta context every registration makes a parameter of its own.
            model.lm_head._parameters["weight"] = model.model.embed_tokens._parameters["weight"]
        return model
