"""FOG's configuration: a variant names the architecture, a size names the dimensions, explicit keys fill in the rest."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from transformers import PretrainedConfig

from foundry_fp8.config import (
    Config,
    ConfigError,
    Positive,
    PositiveNumber,
    at_least,
    below,
    check_arguments,
    from_mapping,
    one_of,
)

__all__ = ["ACTIVATIONS", "SIZES", "VARIANTS", "Architecture", "DecoderConfig", "FogConfig", "check_heads"]

ACTIVATIONS = ("xielu", "gelu", "relu", "swiglu", "smooth_swiglu", "smooth_swiglu_fog")
GATED = ("swiglu", "smooth_swiglu", "smooth_swiglu_fog")
LLAMA31_ROPE_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SELF_LOGIT_WARNING = 4.0
"""Tied embeddings: warn where a token's own logit starts above this (uniform logits of a 131072 vocabulary have 11.8 nats)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture(Config):
    """The choices that define a variant. ``variant: custom`` takes them one by one from the YAML."""

    key = "model"

    pre_norm: bool = True
    """RMSNorm on the input of attention and of the MLP."""
    post_norm: bool = False
    """RMSNorm on the output of attention and of the MLP, before the residual addition."""
    post_norm_gain: PositiveNumber | None = None
    """Initial gain of the post-norm; ``None``: 1/sqrt(layers)."""
    final_norm: bool = True
    """RMSNorm between the last block and the head."""
    layer_scale: bool = False
    """A trainable gain vector on each branch, initially 1/sqrt(layers), without a norm."""
    qk_norm: Literal["none", "rms", "tanh"] = "none"
    """QK regularisation, by head, before RoPE: RMSNorm, or tanh(alpha x) with one alpha a layer for q and one for k."""
    qk_gain: Literal["frozen", "trainable"] = "frozen"
    """Whether the RMSNorm of q and k trains a gain vector."""
    softmax_scale_factor: PositiveNumber = 1.0
    """Logits are multiplied by ``softmax_scale_factor / sqrt(head_dim)``."""
    activation: Annotated[str, one_of(*ACTIVATIONS)] = "swiglu"
    """One of ACTIVATIONS. Gated ones have a gate beside the up projection; the others are 3/2 as wide."""
    input_scaling: bool = False
    """Multiply the embeddings by 1/initializer_range, so that the residual stream starts at RMS 1."""


_FOG = Architecture(
    pre_norm=False,
    post_norm=True,
    final_norm=False,
    qk_norm="rms",
    softmax_scale_factor=math.sqrt(2.0),  # the release's 0.125 at head_dim 128
    activation="xielu",
    input_scaling=True,
)
VARIANTS: dict[str, Architecture] = {
    "fog-max": _FOG,
    "fog-opt": dataclasses.replace(_FOG, activation="gelu"),
    "fog-flash": dataclasses.replace(_FOG, activation="gelu", qk_norm="tanh", softmax_scale_factor=1.0),
    "llama3": Architecture(),
    "olmo2": Architecture(
        pre_norm=False, post_norm=True, post_norm_gain=1.0, qk_norm="rms", qk_gain="trainable"
    ),
    "op1": Architecture(
        pre_norm=False,
        final_norm=False,
        layer_scale=True,
        qk_norm="rms",
        qk_gain="trainable",
        activation="relu",
        input_scaling=True,
    ),
    "llama3-smooth-swiglu": Architecture(activation="smooth_swiglu_fog"),
}
FREE_CHOICES: dict[str, tuple[str, ...]] = {"op1": ("activation",)}
"""Choices that a variant leaves open, because its paper's setting is not confirmed."""


_DIMENSIONS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "tie_word_embeddings",
)  # fmt: skip
SIZES: dict[str, dict[str, int]] = {
    "390m": dict(zip(_DIMENSIONS, (16, 1024, 8, 4, 4096, True), strict=True)),
    "1.5b": dict(zip(_DIMENSIONS, (16, 2048, 16, 8, 8192, False), strict=True)),
    "8b": dict(zip(_DIMENSIONS, (32, 4096, 32, 8, 14336, False), strict=True)),
}
"""Dimensions of the presets. ``intermediate_size`` is that of a gated MLP; one without a gate is 3/2 as wide."""
REMOVED = {
    "qk_gain_value": (1.0, "Multiply softmax_scale by its square."),
    "mlp_input_scale": (None, "Train the model with the version that it was made with (0.1)."),
}
"""Keys of earlier versions: the value without effect, which saved models have, and what to do about another."""


class DecoderConfig(PretrainedConfig):
    """What this package's decoders ask of transformers' configurations."""

    # Of the class: transformers 5 makes it a property that renames and completes what is set.
    rope_scaling = cast(Any, None)
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (the name and the type are transformers')

    def _take(self, kind: type[DecoderConfig], given: Mapping[str, Any]) -> None:
        """Check and keep what the ``__init__`` of ``kind`` was given, its ``locals()``; what is left out there gets its value after."""
        check_arguments(kind, given, "model")
        for name in given.keys() - {"self", "kwargs", "__class__"}:
            setattr(self, name, given[name])

    @property
    def layer_types(self) -> list[str]:
        """What a cache keeps of each block: every key. The window is the mask's, which counts them."""
        return ["full_attention"] * self.num_hidden_layers

    def to_diff_dict(self) -> dict[str, Any]:
        """Every field: what is a default depends on variant and size, so differences to a default configuration would not do."""
        values = self.to_dict()
        # Renamed in transformers 5.
        dtype_to_str = getattr(self, "dict_dtype_to_str", None) or self.dict_torch_dtype_to_str
        dtype_to_str(values)
        return values


class FogConfig(DecoderConfig):
    """The Hugging Face configuration of every variant.

    Args:
        variant: One of ``VARIANTS``, or ``custom`` to set each field of :class:`Architecture`.
        size: One of ``SIZES``; each of its dimensions can also be given.
        vocab_size: Tokens.
        hidden_size: Width d of the residual stream.
        intermediate_size: Width of the MLP; by default that of the size, or 3/2 of it without a gate.
        num_hidden_layers: Blocks L.
        num_attention_heads: Query heads H.
        num_key_value_heads: Key and value heads; divides H. Default: H.
        head_dim: Default: d / H.
        max_position_embeddings: Longest sequence.
        rope_theta: Base of RoPE.
        rope_scaling: Llama 3.1's frequency scaling (``factor``, ``low_freq_factor``, ``high_freq_factor``,
            ``original_max_position_embeddings``). Default: its values; ``False`` for none.
        norm_eps: Epsilon of every RMSNorm.
        initializer_range: Standard deviation sigma of the initial weights. Default 0.02; 0.001 where embeddings are
            tied and scaled by 1/sigma, as in the first author's fork.
        qk_norm_over: ``head``, or ``projection`` (as the original OLMo2 has it: all heads together).
        tanh_alpha_init: Initial alpha of ``qk_norm: tanh``.
        tanh_alpha_trainable: Whether alpha trains.
        softmax_scale: Overrides ``softmax_scale_factor / sqrt(head_dim)``.
        sliding_window: Keys each query sees, itself included; ``None`` for all.
        attention_dropout: Dropout on the attention probabilities.
        tie_word_embeddings: Share the embedding with the head.
        sequence_ids: Whether ``sequence_id`` of the batch keeps packed documents apart.
        kwargs: Fields of :class:`Architecture` and of ``PretrainedConfig``.

    Raises:
        ConfigError: Unknown variant, size or choice; impossible dimensions; a choice that contradicts the variant.
    """

    model_type = "fog"

    def __init__(
        self,
        variant: Annotated[str, one_of(*VARIANTS, "custom")] = "fog-max",
        size: Annotated[str, one_of(*SIZES)] | None = None,
        vocab_size: Positive = 131072,
        hidden_size: Positive | None = None,
        intermediate_size: Positive | None = None,
        num_hidden_layers: Positive | None = None,
        num_attention_heads: Positive | None = None,
        num_key_value_heads: Positive | None = None,
        head_dim: Annotated[int, at_least(2)] | None = None,
        max_position_embeddings: Positive = 4096,
        rope_theta: PositiveNumber = 500000.0,
        rope_scaling: Mapping[str, PositiveNumber] | Literal[False] | None = None,
        norm_eps: PositiveNumber = 1e-5,
        initializer_range: PositiveNumber | None = None,
        qk_norm_over: Literal["head", "projection"] = "head",
        tanh_alpha_init: PositiveNumber = 1.0,
        tanh_alpha_trainable: bool = True,
        softmax_scale: PositiveNumber | None = None,
        sliding_window: Positive | None = None,
        attention_dropout: Annotated[float, at_least(0), below(1)] = 0.0,
        tie_word_embeddings: bool | None = None,
        sequence_ids: bool = True,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self._take(FogConfig, locals())
        for key, (without_effect, instead) in REMOVED.items():
            if kwargs.pop(key, without_effect) != without_effect:
                raise ConfigError(f"model.{key}: it was removed. {instead}")
        architecture = _resolve_architecture(variant, kwargs)
        for field in dataclasses.fields(Architecture):
            setattr(self, field.name, getattr(architecture, field.name))

        given = {name: getattr(self, name) for name in _DIMENSIONS}
        # A model described by its own dimensions takes nothing from a preset behind the user's back.
        explicit = size is None and any(value is not None for value in given.values())
        preset = _complete_dimensions(given, head_dim) if explicit else SIZES[size or "390m"]
        values = preset | {key: value for key, value in given.items() if value is not None}
        if intermediate_size is None and architecture.activation not in GATED:
            values["intermediate_size"] = preset["intermediate_size"] * 3 // 2
        tied = bool(values.pop("tie_word_embeddings"))
        for key, value in values.items():
            setattr(self, key, value)
        self.head_dim = self.hidden_size // self.num_attention_heads if head_dim is None else head_dim

        self.rope_scaling = dict(LLAMA31_ROPE_SCALING) if rope_scaling is None else rope_scaling
        scaled_and_tied = tied and architecture.input_scaling
        self.initializer_range = (
            (0.001 if scaled_and_tied else 0.02) if initializer_range is None else initializer_range
        )
        self.softmax_scale = (
            architecture.softmax_scale_factor / math.sqrt(self.head_dim)
            if softmax_scale is None
            else softmax_scale
        )
        super().__init__(tie_word_embeddings=tied, **kwargs)
        self._check(scaled_and_tied)

    def _check(self, scaled_and_tied: bool) -> None:
        check_heads(self)
        if self.head_dim * self.num_attention_heads != self.hidden_size and self.size is not None:
            raise ConfigError(
                f"model.head_dim: {self.head_dim} contradicts size={self.size}, whose head_dim is "
                f"{self.hidden_size // self.num_attention_heads}. Leave size out to set every dimension."
            )
        self._check_parts()
        logit = self.hidden_size * self.initializer_range
        if scaled_and_tied and logit > SELF_LOGIT_WARNING:
            warnings.warn(
                f"model.tie_word_embeddings with input scaling 1/sigma: the logit of the input token itself starts at "
                f"about hidden_size * initializer_range = {logit:.1f}. Set initializer_range below "
                f"{SELF_LOGIT_WARNING / self.hidden_size:.2g}, or tie_word_embeddings: false.",
                stacklevel=3,
            )

    def _check_parts(self) -> None:
        """Refuse what a part without effect would swallow."""
        if self.post_norm and self.layer_scale:
            raise ConfigError(
                "model.layer_scale: true contradicts post_norm: true. A branch has one of them."
            )
        branch_gain = self.post_norm or self.layer_scale
        for key, without_effect, has_effect, part in (
            ("qk_gain", "frozen", self.qk_norm == "rms", "qk_norm: rms"),
            ("qk_norm_over", "head", self.qk_norm == "rms", "qk_norm: rms"),
            ("tanh_alpha_init", 1.0, self.qk_norm == "tanh", "qk_norm: tanh"),
            ("tanh_alpha_trainable", True, self.qk_norm == "tanh", "qk_norm: tanh"),
            ("post_norm_gain", None, branch_gain, "post_norm or layer_scale"),
        ):
            if getattr(self, key) != without_effect and not has_effect:
                raise ConfigError(
                    f"model.{key}: {getattr(self, key)!r} has no effect in variant={self.variant}: it belongs to {part}. "
                    "Remove it."
                )

    @property
    def embedding_multiplier(self) -> float:
        """What the embeddings are multiplied with: 1/sigma, or 1."""
        return 1.0 / self.initializer_range if self.input_scaling else 1.0

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.activation in GATED


def _resolve_architecture(variant: str, kwargs: dict[str, Any]) -> Architecture:
    """Take Architecture's fields out of ``kwargs``; they may repeat a named variant's choices, not contradict them."""
    names = [field.name for field in dataclasses.fields(Architecture)]
    given = {name: kwargs.pop(name) for name in names if name in kwargs}
    custom = from_mapping(Architecture, given, "model")
    if variant == "custom":
        return custom
    base = VARIANTS[variant]
    free = FREE_CHOICES.get(variant, ())
    for name, value in given.items():
        if value != getattr(base, name) and name not in free:
            raise ConfigError(
                f"model.{name}: {value!r} contradicts variant={variant}, which means {getattr(base, name)!r}. "
                f"Use variant: custom to combine parts freely."
            )
    return dataclasses.replace(base, **given)


def _complete_dimensions(given: dict[str, Any], head_dim: int | None) -> dict[str, int]:
    """What follows from explicit dimensions, of which depth, width and heads must be said."""
    required = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in required if given[key] is None]
    if missing:
        raise ConfigError(
            f"model.{missing[0]}: missing. Give {', '.join(required)}, or a size ({', '.join(SIZES)})."
        )
    hidden, heads = given["hidden_size"], given["num_attention_heads"]
    if head_dim is None and hidden % heads:
        raise ConfigError(
            f"model.num_attention_heads: {heads} does not divide hidden_size={hidden}, and head_dim is not given."
        )
    return {"num_key_value_heads": heads, "intermediate_size": 4 * hidden, "tie_word_embeddings": False}


def check_heads(config: Any) -> None:
    """Refuse heads that do not group or that RoPE cannot turn, and scalings of RoPE other than Llama 3.1's.

    Raises:
        ConfigError: With the key of ``model``.
    """
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"model.num_key_value_heads: {config.num_key_value_heads} does not divide num_attention_heads="
            f"{config.num_attention_heads}."
        )
    if config.head_dim % 2:
        raise ConfigError(
            f"model.head_dim: {config.head_dim} (hidden_size / num_attention_heads where it is not given) is odd, and RoPE "
            "turns pairs of elements."
        )
    if config.rope_scaling is not False and set(config.rope_scaling) != set(LLAMA31_ROPE_SCALING):
        raise ConfigError(
            f"model.rope_scaling: {config.rope_scaling!r} is neither false nor a mapping of exactly "
            f"{', '.join(LLAMA31_ROPE_SCALING)}."
        )
