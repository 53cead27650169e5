"""How FP8 attention gets into a model: through MPT's, transformers' and torch's own seams.

=============== =========================================================== ==========================================
host            recognised by                                               attached by
=============== =========================================================== ==========================================
LLM Foundry MPT its attention classes, with ``attn_impl: torch``            the module's ``attn_fn``
Hugging Face    a ``forward`` that looks up ``ALL_ATTENTION_FUNCTIONS``     that registry, and a configuration of the module's own
torch           a ``forward`` that calls ``scaled_dot_product_attention``   a torch function mode around the module
=============== =========================================================== ==========================================

No library is imported here: a module's own class leads to the registry of the library that it came from. Attention that is not
converted keeps what it had, and so does converted attention while it runs in high precision. A dense mask is exchanged for the
rules that it was made of (:mod:`.attention_inputs`), or kept as a bias where it means anything else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.model_structure.wrappers import names_in_forward, own_forward
from foundry_fp8.surgery.attention_inputs import BatchMasks

__all__ = [
    "HOSTS", "HUGGING_FACE_IMPLEMENTATION", "AttentionHost", "HuggingFaceHost", "by_heads", "register_attention",
]  # fmt: skip

HUGGING_FACE_IMPLEMENTATION = "fp8_dpa"
"""The name under which FP8 attention stands in transformers' registry of attention functions."""
CHILD = "fp8_attention"
REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_ORIGINAL = "_foundry_fp8_attn_implementation"
_MASKS = "_foundry_fp8_batch_masks"


class AttentionHost(Protocol):
    """A kind of attention module."""

    name: ClassVar[str]

    def recognises(self, module: nn.Module) -> bool:
        """Whether ``module`` is of this kind."""

    def reason(self, module: nn.Module) -> str | None:
        """Why this module cannot take FP8 attention, or ``None``."""

    def attach(self, module: nn.Module, attention: FP8DotProductAttention, masks: BatchMasks) -> None:
        """Let ``module`` call ``attention``, and what was there where that does not run FP8."""


def register_attention(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Put ``function`` as ``name`` into the registry that the forward of ``module``, a :class:`HuggingFaceHost`'s, looks into."""
    own_forward(module).__globals__[REGISTRY][name] = function


def by_heads(*parts: tuple[Tensor, int]) -> tuple[Tensor, ...]:
    """[b, s, heads * d] and heads, to [b, heads, s, d]."""
    return tuple(x.unflatten(-1, (heads, -1)).transpose(1, 2) for x, heads in parts)


class MPTAttention(nn.Module):
    """Stands in for Foundry's attention function, with its signature; ``attn_impl: torch``."""

    def __init__(
        self, attention: FP8DotProductAttention, original: Callable[..., Any], masks: BatchMasks
    ) -> None:
        super().__init__()
        self.fp8 = attention
        self.original = original
        self.masks = masks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Foundry's ``scaled_multihead_dot_product_attention``."""
        return (self._attend if self.fp8.runs_fp8 else self.original)(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        n_heads: int,
        kv_n_heads: int,
        past_key_value: tuple[Tensor, ...] | None = None,
        softmax_scale: float | None = None,
        attn_bias: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        training: bool = False,
        needs_weights: bool = False,
        attn_logit_softcapping: float | None = None,
        sliding_window_size: int = -1,
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
        """``query`` [b, q, heads * d], and so on."""
        if needs_weights:
            raise RuntimeError(f"{self.fp8.fqn}: FP8 attention keeps no probabilities (output_attentions).")
        q, k, v = by_heads((query, n_heads), (key, kv_n_heads), (value, kv_n_heads))
        if past_key_value is not None:
            if len(past_key_value):  # Foundry keeps keys as [b, heads, d, s]
                k = torch.cat([past_key_value[0].transpose(2, 3), k], dim=2)
                v = torch.cat([past_key_value[1], v], dim=2)
            past_key_value = (k.transpose(2, 3), v)
        mask = self._mask(attn_bias, key_padding_mask, q, k, is_causal, sliding_window_size)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        out = self.fp8(q, k, v, mask=mask, softmax_scale=scale, dropout_p=dropout_p if training else 0.0)
        return out.transpose(1, 2).flatten(2), None, past_key_value

    def _mask(
        self, bias: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, causal: bool, size: int
    ) -> AttentionMask:
        queries, keys = q.shape[2], k.shape[2]
        window = None if size == -1 or size >= keys else (size, size)
        rules = None
        if bias is not None:
            # Foundry's bias holds padding, documents and ALiBi; the causal rule and the window come beside it.
            rules = self.masks.rules(bias, queries, keys, causal=False, window=None, padding=padding)
            bias = bias[:, :, max(0, bias.size(2) - queries) :, max(0, bias.size(3) - keys) :]
        if rules is not None:
            return rules.also(causal=causal, window=window)
        return AttentionMask(causal=causal, window=window, key_padding=padding, bias=bias)


class FoundryHost:
    """LLM Foundry's attention classes and those derived from them."""

    name: ClassVar[str] = "MPT"

    def recognises(self, module: nn.Module) -> bool:
        """By the class, and by the attributes that are used here."""
        ours = any(c.__module__ == "llmfoundry.models.layers.attention" for c in type(module).__mro__)
        return ours and hasattr(module, "attn_fn") and hasattr(module, "attn_impl")

    def reason(self, module: nn.Module) -> str | None:
        """``attn_impl: torch`` without soft capping."""
        if isinstance(module.attn_fn, MPTAttention):
            return "it is converted already"
        if module.attn_impl != "torch":
            return (
                f"attn_impl is {module.attn_impl}, with which packed documents travel outside of the mask; FP8 attention stands in for "
                "attn_impl: torch, on a GPU with a fused kernel too"
            )
        if getattr(module, "attn_logit_softcapping", None) is not None:
            return "attn_logit_softcapping is not part of FP8 attention"
        return None

    def attach(self, module: nn.Module, attention: FP8DotProductAttention, masks: BatchMasks) -> None:
        """Replace the function that the module holds."""
        original: Any = module.attn_fn
        module.attn_fn = MPTAttention(attention, original, masks)


def hugging_face_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function ``fp8_dpa``, of a converted module that runs FP8.

    Args:
        module: The attention module.
        query: [b, heads, q, d].
        key: [b, kv_heads, k, d].
        value: [b, kv_heads, k, d].
        attention_mask: As the model made it for the implementation it has: additive or boolean, broadcasting to [b, heads,
            q, k]; [b, k] for flash attention.
        dropout: Probability of dropping a probability.
        scaling: Multiplies the logits; ``None``: 1/sqrt(d).
        is_causal: ``None``: where there is no mask and more than one query.
        kwargs: What else models pass; a soft cap is refused.

    Returns:
        [b, q, heads, d], and no probabilities.
    """
    attention = module._modules[CHILD]
    assert isinstance(attention, FP8DotProductAttention)
    if kwargs.get("softcap") is not None:
        raise RuntimeError(f"{attention.fqn}: soft capping of the logits is not part of FP8 attention.")
    mask = _hugging_face_mask(module, attention_mask, query.shape[2], key.shape[2], is_causal, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention(query, key, value, mask=mask, softmax_scale=scale, dropout_p=dropout)
    return out.transpose(1, 2).contiguous(), None


def _hugging_face_mask(
    module: nn.Module,
    given: Tensor | None,
    queries: int,
    keys: int,
    is_causal: bool | None,
    kwargs: Mapping[str, Any],
) -> AttentionMask:
    """What the model means by ``given``."""
    size = kwargs.get("sliding_window", getattr(module.config, "sliding_window", None))
    window = None if size is None or size >= keys else (size - 1, None)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if given is not None and given.dim() == 4:
        given = given if given.shape[-1] == keys else given[..., :keys]
        masks: BatchMasks = module.__dict__[_MASKS]
        # The window is in the mask of some models and not of others, as transformers' versions go.
        for of_mask in dict.fromkeys((window, None)):
            rules = masks.rules(given, queries, keys, causal=causal, window=of_mask)
            if rules is not None:
                return rules
        return AttentionMask(bias=given)
    return AttentionMask(causal=causal and queries > 1, window=window, key_padding=given)


class HuggingFaceHost:
    """Attention modules that go through transformers' ``AttentionInterface`` (4.48 and later), FOG's among them."""

    name: ClassVar[str] = "Hugging Face"

    def recognises(self, module: nn.Module) -> bool:
        """By the look-up in the code of its forward."""
        return REGISTRY in names_in_forward(module) and hasattr(module, "config")

    def reason(self, module: nn.Module) -> str | None:
        """Anything but soft capping."""
        if CHILD in module._modules:
            return "it is converted already"
        if getattr(module, "attn_logit_softcapping", None) is not None:
            return "attn_logit_softcapping is not part of FP8 attention"
        config: Any = module.config
        implementation = config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            return (
                f"attn_implementation is {implementation}, with which packed documents travel outside of the mask; "
                "FP8 attention stands in for sdpa and eager"
            )
        return None

    def attach(self, module: nn.Module, attention: FP8DotProductAttention, masks: BatchMasks) -> None:
        """Register the function, give the module a configuration of its own that names it, and leave the state on the module."""
        register_attention(module, HUGGING_FACE_IMPLEMENTATION, hugging_face_attention)
        config: Any = module.config
        module.__dict__[_ORIGINAL] = config._attn_implementation
        module.__dict__[_MASKS] = masks
        # The model's own configuration still says what the others run, and so what masks are made.
        module.config = copy.copy(config)
        module.add_module(CHILD, attention)
        module.register_forward_pre_hook(_name_implementation)


def _name_implementation(module: nn.Module, args: Any) -> None:
    """FP8 where it runs, else what the module had."""
    attention = module._modules[CHILD]
    assert isinstance(attention, FP8DotProductAttention)
    config: Any = module.config
    runs = HUGGING_FACE_IMPLEMENTATION if attention.runs_fp8 else module.__dict__[_ORIGINAL]
    config._attn_implementation = runs


class _SDPAMode(TorchFunctionMode):
    """Sends ``scaled_dot_product_attention`` to FP8 attention while it is entered."""

    def __init__(self, attention: FP8DotProductAttention) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and self.attention.runs_fp8:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.dim() != 4 or (is_causal and query.shape[2] != key.shape[2]):
            raise RuntimeError(
                f"{self.attention.fqn}: FP8 attention takes scaled_dot_product_attention of [b, heads, s, d], causal only "
                f"with as many queries as keys; got {tuple(query.shape)} and {tuple(key.shape)}."
            )
        mask = AttentionMask(causal=is_causal, bias=attn_mask)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return self.attention(query, key, value, mask=mask, softmax_scale=scale, dropout_p=dropout_p)


class TorchHost:
    """Modules of any other origin that call ``torch.nn.functional.scaled_dot_product_attention`` themselves."""

    name: ClassVar[str] = "torch"

    def recognises(self, module: nn.Module) -> bool:
        """By the call in the code of its forward."""
        return "scaled_dot_product_attention" in names_in_forward(module)

    def reason(self, module: nn.Module) -> str | None:
        """Anything."""
        return "it is converted already" if CHILD in module._modules else None

    def attach(self, module: nn.Module, attention: FP8DotProductAttention, masks: BatchMasks) -> None:
        """Enter the mode before, and leave it after, each forward of the module."""
        entered: list[_SDPAMode] = []

        def enter(_: nn.Module, args: Any) -> None:
            entered.append(_SDPAMode(attention))
            entered[-1].__enter__()

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            entered.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        module.add_module(CHILD, attention)


HOSTS: tuple[AttentionHost, ...] = (FoundryHost(), HuggingFaceHost(), TorchHost())
