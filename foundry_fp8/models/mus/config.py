"""The configuration of a µnit-scaled decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from foundry_fp8.config import ConfigError, Positive, PositiveNumber, at_least, below, one_of
from foundry_fp8.models.fog.config import DecoderConfig, check_heads
from foundry_fp8.models.mus.residual import Tau, default_tau

__all__ = ["SIZES", "MusConfig", "default_tau"]

SIZES = {"1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40)}
"""Width, layers and heads of the paper's models (its table 4)."""


class MusConfig(DecoderConfig):
    """The Hugging Face configuration.

    Args:
        size: One of ``SIZES``; width, layers and heads can be given instead.
        vocab_size: Tokens.
        hidden_size: Width d of the residual stream.
        num_hidden_layers: Blocks.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; divides the query heads. Default: as many.
        intermediate_size: Width of the MLP. Default: 4 d.
        head_dim: Default: d / heads.
        hidden_multiplier: What hidden linears multiply by. Default: 1/sqrt(fan_in) each. 1 in an exported checkpoint, whose weights have
            it in their scales; such a model is not trained.
        tau: The share of each branch in the variance of the residual stream. Default: :func:`default_tau` of the depth.
        activation: ``gelu``, ``silu`` or ``relu``.
        final_norm: Whether a LayerNorm follows the last block, as in MPT, which the paper trained; the paper's text names none. A
            configuration that was saved without this key has none.
        qk_norm: ``rms``: an RMSNorm with a gain over each head's queries and keys, before RoPE, which bounds the attention logits. The
            paper has none.
        square_root_softmax: Whether attention weighs values by the square roots of the probabilities, which keeps the variance of
            independent values; computed by the eager implementation, whatever ``attn_implementation`` says. The paper proposes it and trains
            without it.
        max_position_embeddings: Longest sequence.
        rope_theta: Base of RoPE.
        rope_scaling: As FogConfig's. Default: none.
        norm_eps: Epsilon of every LayerNorm.
        sliding_window: Keys each query sees, itself included; ``None`` for all.
        attention_dropout: Dropout on the attention probabilities.
        sequence_ids: Whether ``sequence_id`` of the batch keeps packed documents apart.
        use_cache: Whether a forward returns its keys and values.
        tie_word_embeddings: Must be false.
        kwargs: Fields of ``PretrainedConfig``.

    Raises:
        ConfigError: Impossible dimensions, tau outside (0, 1), tied embeddings.
    """

    model_type = "mus"

    # What FOG's decoder, of which this one is made, asks of a configuration besides.
    qk_norm_over = "head"
    qk_gain = "trainable"
    embedding_multiplier = 1.0

    def __init__(
        self,
        size: Annotated[str, one_of(*SIZES)] | None = None,
        vocab_size: Positive = 100352,
        hidden_size: Positive | None = None,
        num_hidden_layers: Positive | None = None,
        num_attention_heads: Positive | None = None,
        num_key_value_heads: Positive | None = None,
        intermediate_size: Positive | None = None,
        head_dim: Annotated[int, at_least(2)] | None = None,
        hidden_multiplier: PositiveNumber | None = None,
        tau: Tau | None = None,
        activation: Literal["gelu", "silu", "relu"] = "gelu",
        final_norm: bool = True,
        qk_norm: Literal["none", "rms"] = "none",
        square_root_softmax: bool = False,
        max_position_embeddings: Positive = 4096,
        rope_theta: PositiveNumber = 10000.0,
        rope_scaling: Mapping[str, PositiveNumber] | Literal[False] = False,
        norm_eps: PositiveNumber = 1e-5,
        sliding_window: Positive | None = None,
        attention_dropout: Annotated[float, at_least(0), below(1)] = 0.0,
        sequence_ids: bool = True,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self._take(MusConfig, locals())
        given = {n: getattr(self, n) for n in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
        # A model described by its own dimensions takes nothing from a preset behind the user's back.
        preset = SIZES[size or "1b"] if size or not any(given.values()) else (None, None, None)
        for (key, own), of_size in zip(given.items(), preset, strict=True):
            value = own or of_size
            if value is None:
                raise ConfigError(
                    f"model.{key}: missing. Give it beside the others, or a size ({', '.join(SIZES)})."
                )
            setattr(self, key, value)
        self.num_key_value_heads = num_key_value_heads or self.num_attention_heads
        self.intermediate_size = intermediate_size or 4 * self.hidden_size
        self.head_dim = head_dim or self.hidden_size // self.num_attention_heads
        self.tau = default_tau(self.num_hidden_layers) if tau is None else float(tau)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self._check(head_dim)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As transformers'; a saved configuration without ``final_norm`` is of a model that has none."""
        return super().from_dict({"final_norm": False, **config_dict}, **kwargs)

    def _check(self, head_dim: int | None) -> None:
        if self.tie_word_embeddings:
            raise ConfigError(
                "model.tie_word_embeddings: true cannot be µnit-scaled: the input table has multiplier 1 and the head "
                "1/hidden_size, and both have unit weights. Set it to false."
            )
        if head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"model.num_attention_heads: {self.num_attention_heads} does not divide hidden_size={self.hidden_size}, and "
                "head_dim is not given."
            )
        check_heads(self)

    @property
    def softmax_scale(self) -> float:
        """What attention logits are multiplied by: 1/sqrt(head_dim), which keeps unit variance."""
        return 1 / math.sqrt(self.head_dim)
