"""The decoder of every variant, as Hugging Face models: :class:`FogModel` and, with a head, :class:`FogForCausalLM`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.models.fog.attention import FogAttention
from foundry_fp8.models.fog.config import FogConfig
from foundry_fp8.models.fog.feedforward import MLP, XIELU, GatedMLP
from foundry_fp8.models.fog.norms import LayerScale, RMSNorm, TanhNorm
from foundry_fp8.models.fog.rope import rope_frequencies, rope_tables

__all__ = ["FogBlock", "FogForCausalLM", "FogModel", "FogPreTrainedModel"]


CACHE = next(
    f.name for f in dataclasses.fields(BaseModelOutputWithPast) if f.name in ("cache", "past_key_values")
)
"""What transformers calls keys and values of earlier tokens."""


class FogBlock(nn.Module):
    """One block; each part is an identity where the variant has none::

        h' = h  + out1(attention(in1(h)))
        h" = h' + out2(mlp(in2(h')))

    ``in``: the pre-norm. ``out``: the post-norm or LayerScale.
    """

    def __init__(self, config: FogConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_norm = _pre_norm(config)
        self.self_attn = FogAttention(config, layer_idx)
        self.attention_post_norm = _branch_output(config)
        self.mlp_norm = _pre_norm(config)
        mlp = GatedMLP if config.gated else MLP
        self.mlp = mlp(config.hidden_size, config.intermediate_size, config.activation)
        self.mlp_post_norm = _branch_output(config)

    def forward(self, hidden: Tensor, **attention: Any) -> tuple[Tensor, Tensor | None]:
        """``hidden``: [b, s, hidden]. Returns the same shape, and the attention's probabilities or ``None``."""
        branch, probabilities = self.self_attn(self.input_norm(hidden), **attention)
        hidden = hidden + self.attention_post_norm(branch)
        branch = self.mlp(self.mlp_norm(hidden))
        return hidden + self.mlp_post_norm(branch), probabilities


def _pre_norm(config: FogConfig) -> nn.Module:
    return RMSNorm(config.hidden_size, eps=config.norm_eps) if config.pre_norm else nn.Identity()


def _branch_output(config: FogConfig) -> nn.Module:
    gain = config.num_hidden_layers**-0.5 if config.post_norm_gain is None else config.post_norm_gain
    if config.post_norm:
        return RMSNorm(config.hidden_size, eps=config.norm_eps, gain=gain)
    return LayerScale(config.hidden_size, gain=gain) if config.layer_scale else nn.Identity()


class FogPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of FOG models."""

    config_class = FogConfig  # type: ignore[assignment]  # transformers annotates these with None
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FogBlock"]  # type: ignore[assignment]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # type: ignore[assignment]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    _supports_cache_class = True

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the parameters that ``module`` owns: N(0, sigma); sigma / sqrt(2 L) where a branch ends."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            if getattr(module, "_is_residual", False):
                std /= (2 * self.config.num_hidden_layers) ** 0.5
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, RMSNorm | LayerScale | TanhNorm | XIELU):
            module.reset_parameters()


class FogModel(FogPreTrainedModel):
    """Embedding, scaled by ``embedding_multiplier``; the blocks; the final norm where the variant has one."""

    block: type[nn.Module] = FogBlock

    def __init__(self, config: FogConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([self.block(config, i) for i in range(config.num_hidden_layers)])
        self.norm = self.new_norm(config) if config.final_norm else nn.Identity()
        self.frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling or False)
        self.gradient_checkpointing = False
        self.post_init()

    @staticmethod
    def new_norm(config: FogConfig) -> nn.Module:
        """The norm after the last block."""
        return RMSNorm(config.hidden_size, eps=config.norm_eps)

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.embed_tokens = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        sequence_id: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Tensor | None = None,
        cache: Cache | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden states of a batch.

        Args:
            input_ids: [b, s], or give ``inputs_embeds``.
            attention_mask: [b, cached + s], nonzero at tokens; or additive, broadcasting to [b, heads, s, cached + s].
            position_ids: [b, s]. Default: counted from what is cached.
            sequence_id: [b, s], the document of each token of a packed sequence; -1 for padding. Not with a cache.
            past_key_values: Keys and values of earlier tokens.
            inputs_embeds: [b, s, hidden], before input scaling.
            use_cache: Return the cache.
            output_attentions: Return the probabilities (eager attention only).
            output_hidden_states: Return the residual stream before each block, and the output.
            return_dict: ``False`` for a tuple.
            cache_position: [s]. Default: counted from what is cached.
            cache: ``past_key_values``, as transformers calls it from 5.24 on.
        """
        past_key_values = past_key_values if cache is None else cache
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = embeds * self.config.embedding_multiplier
        checkpoint = self.gradient_checkpointing and self.training
        use_cache = (self.config.use_cache if use_cache is None else use_cache) and not checkpoint
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        cached = past_key_values.get_seq_length() if past_key_values is not None else 0
        s = hidden.shape[1]
        if cache_position is None:
            cache_position = torch.arange(cached, cached + s, device=hidden.device)
        if position_ids is None:
            position_ids = cache_position.unsqueeze(0)

        if output_attentions and self.config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions: the {self.config._attn_implementation} attention keeps no probabilities. "
                'Load the model with attn_implementation="eager".'
            )
        mask = self._attention_mask(attention_mask, sequence_id, s, cached, hidden, past_key_values)
        shared = {
            "rope": rope_tables(position_ids, self.frequencies),
            "attention_mask": mask,
            "past_key_values": past_key_values,
            "cache_position": cache_position,
        }
        states, attentions = [], []
        for block in self.layers:
            # Held otherwise, they would defeat offloading and packing of blocks' inputs.
            if output_hidden_states:
                states.append(hidden)
            if checkpoint:
                hidden, probabilities = self._gradient_checkpointing_func(
                    lambda h, block=block: block(h, **shared), hidden
                )
            else:
                hidden, probabilities = block(hidden, **shared)
            attentions.append(probabilities)
        hidden = self.norm(hidden)
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden,
            **{CACHE: past_key_values if use_cache else None},  # type: ignore[arg-type]
            hidden_states=(*states, hidden) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )
        return output if return_dict is not False else output.to_tuple()

    def _attention_mask(
        self,
        attention_mask: Tensor | None,
        sequence_id: Tensor | None,
        s: int,
        cached: int,
        hidden: Tensor,
        cache: Cache | None,
    ) -> Any:
        """The mask in the form the attention implementation takes: a tensor, or ``None`` for plain causal."""
        if cache is not None and getattr(cache, "is_compileable", False):
            raise ConfigError(
                f"cache_implementation: {type(cache).__name__} returns more keys than there are tokens, which FOG's mask "
                "does not cover. Use the dynamic cache, which is the default."
            )
        window = self.config.sliding_window
        documents = sequence_id if self.config.sequence_ids else None
        if documents is not None and cached:
            raise ValueError("sequence_id: packed documents cannot be continued from a cache.")
        keys = cached + s
        bias = None
        if attention_mask is not None and attention_mask.dim() == 4:
            bias, attention_mask = attention_mask[..., :keys], None
        rules = AttentionMask(
            causal=True,
            window=None if window is None else (window - 1, 0),
            key_padding=attention_mask,
            documents=documents,
            bias=bias,
        )
        implementation = self.config._attn_implementation
        plain = attention_mask is None and documents is None and bias is None and window is None
        if plain and implementation == "sdpa" and (cached == 0 or s == 1):
            return None
        if implementation == "sdpa" and bias is None:
            # Boolean: autocast would turn the float32 minimum into -Inf, and a fully masked row into NaN.
            seen, _ = rules.block(0, s, 0, keys, s, keys, hidden.device)
            return None if seen is None else seen.expand(torch.broadcast_shapes(seen.shape, (1, 1, s, keys)))
        return rules.dense(s, keys, hidden.device, hidden.dtype)


class FogForCausalLM(FogPreTrainedModel, GenerationMixin):
    """:class:`FogModel` with a language-model head, tied to the embedding where the configuration says so."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # type: ignore[assignment]  # noqa: RUF012
    decoder: type[FogModel] = FogModel

    def __init__(self, config: FogConfig) -> None:
        super().__init__(config)
        self.model = self.decoder(config)
        self.vocab_size = config.vocab_size
        self.lm_head = self.new_head(config.vocab_size)
        self.post_init()

    def new_head(self, vocab_size: int) -> nn.Linear:
        """A head for so many tokens, not initialised."""
        return nn.Linear(self.config.hidden_size, vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.lm_head = new_embeddings  # type: ignore[assignment]

    def get_decoder(self) -> FogModel:
        """The model without its head."""
        return self.model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        sequence_id: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits [b, s, vocab_size], and with ``labels`` ([b, s], -100 to leave out, shifted here) the mean loss.

        Other arguments as :meth:`FogModel.forward`; ``logits_to_keep`` last positions only, where it is not 0.
        """
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            sequence_id=sequence_id,
            past_key_values=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            cache_position=cache_position,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, keep, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        output = CausalLMOutputWithPast(
            loss=loss,  # type: ignore[arg-type]
            logits=logits,
            **{CACHE: out.get(CACHE)},
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )
        return output if return_dict is not False else output.to_tuple()


AutoConfig.register("fog", FogConfig)
AutoModel.register(FogConfig, FogModel)
AutoModelForCausalLM.register(FogConfig, FogForCausalLM)
