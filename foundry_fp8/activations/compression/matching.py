"""Which modules have a fused form that keeps only its input, and giving it to them.

A class is known by its module and name: another class of the same name (anybody's ``RMSNorm``) and a subclass may compute
something else, as Gemma's norm does, which multiplies by 1 + weight. So may a class or an instance whose forward was replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from foundry_fp8.activations.compression.fused_activation import ActivationKind, packed_activation
from foundry_fp8.activations.compression.fused_norm import packed_norm
from foundry_fp8.model_structure.fused_classes import fuse
from foundry_fp8.model_structure.names import qualified_name
from foundry_fp8.model_structure.wrappers import own_class
from foundry_fp8.numerics.packed import PackFormat

__all__ = ["LAYER_NORMS", "MLPS", "RMS_NORMS", "fuse_mlp", "fuse_norm"]

Projection = Callable[[Any, Tensor], tuple[Tensor, Tensor | None]]
"""From an MLP and its input to the gate and, where it is gated, the other factor."""


def _separate(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return mlp.gate_proj(x), mlp.up_proj(x)


def _joint(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
    return gate, up


def _ungated(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return mlp.up_proj(x), None


def _transformers(*names: str) -> tuple[str, ...]:
    """``llama.LlamaMLP`` -> ``transformers.models.llama.modeling_llama.LlamaMLP``."""
    split = (name.split(".") for name in names)
    return tuple(f"transformers.models.{model}.modeling_{model}.{cls}" for model, cls in split)


_FOG = "foundry_fp8.models.fog"
_FOUNDRY = "llmfoundry.models.layers"

MLPS: dict[str, Projection] = {
    **dict.fromkeys(
        _transformers(
            "llama.LlamaMLP", "mistral.MistralMLP", "qwen2.Qwen2MLP", "qwen3.Qwen3MLP", "gemma.GemmaMLP",
            "gemma2.Gemma2MLP", "olmo.OlmoMLP", "olmo2.Olmo2MLP",
        ),
        _separate,
    ),
    f"{_FOUNDRY}.ffn.MPTGLU": _separate,
    f"{_FOUNDRY}.ffn.MPTMLP": _ungated,
    f"{_FOG}.feedforward.MLP": _ungated,
    f"{_FOG}.mpt_parts.FogMPTFFN": _ungated,
    f"{_FOG}.feedforward.GatedMLP": _joint,
}  # fmt: skip
RMS_NORMS = frozenset(
    (
        *_transformers(
            "llama.LlamaRMSNorm", "mistral.MistralRMSNorm", "mixtral.MixtralRMSNorm", "qwen2.Qwen2RMSNorm",
            "qwen3.Qwen3RMSNorm", "olmo2.Olmo2RMSNorm", "phi3.Phi3RMSNorm", "granite.GraniteRMSNorm",
        ),
        "torch.nn.modules.normalization.RMSNorm",
        f"{_FOUNDRY}.norm.LPRMSNorm",
        f"{_FOG}.norms.RMSNorm",
    )
)  # fmt: skip
LAYER_NORMS = frozenset(("torch.nn.modules.normalization.LayerNorm", f"{_FOUNDRY}.norm.LPLayerNorm"))

_ACTIVATIONS: dict[str, ActivationKind] = {
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.PytorchGELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    f"{_FOG}.feedforward.XIELU": "xielu",
}


def fuse_mlp(module: nn.Module, fmt: PackFormat | None) -> bool:
    """Let a known gated or plain MLP keep the inputs of its activation function, and no more. False if it is unknown."""
    if _known(module) not in MLPS or _activation_kind(_activation(module)) is None:
        return False
    fuse(module, _mlp_forward, fmt)
    return True


def fuse_norm(module: nn.Module, fmt: PackFormat | None) -> bool:
    """Let a known LayerNorm or RMSNorm keep its input, and no more. False if it is unknown."""
    name = _known(module)
    shape = getattr(module, "normalized_shape", (0,))
    if (name not in LAYER_NORMS and name not in RMS_NORMS) or _eps(module) is None or len(shape) != 1:
        return False
    fuse(module, _norm_forward, fmt)
    return True


def _known(module: nn.Module) -> str | None:
    """The module and name of the class whose forward ``module`` runs; ``None`` where somebody replaced it."""
    cls = own_class(module)
    defined_in: Any = next((base for base in cls.__mro__ if "forward" in vars(base)), cls)
    replaced = "forward" in vars(module) or defined_in.forward.__module__ != defined_in.__module__
    return None if replaced else qualified_name(cls)


def _mlp_forward(cls: type[nn.Module], fmt: PackFormat | None) -> Callable[..., Tensor]:
    project = MLPS[qualified_name(own_class(cls))]

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = project(self, x)
        act, down = _activation(self), self.down_proj
        kind = _activation_kind(act)
        assert kind is not None
        slopes = act.slopes() if kind == "xielu" else None
        # A plain linear is a function of its parameters; anything else (FP8, FSDP, LoRA, hooks) has to be called.
        if type(down) is nn.Linear and not (down._forward_hooks or down._forward_pre_hooks):
            linear = {"weight": down.weight, "bias": down.bias}
            y = packed_activation(gate, up, act, kind, fmt, slopes=slopes, **linear)
        else:
            y = down(packed_activation(gate, up, act, kind, fmt, slopes=slopes))
        post_norm = getattr(self, "post_norm", None)
        return y if post_norm is None else post_norm(y)

    return forward


def _norm_forward(cls: type[nn.Module], fmt: PackFormat | None) -> Callable[..., Tensor]:
    centred = qualified_name(own_class(cls)) in LAYER_NORMS

    def forward(self: Any, x: Tensor) -> Tensor:
        bias, norm = getattr(self, "bias", None), functools.partial(cls.forward, self)
        gain = getattr(self, "gain", 1.0) if self.weight is None else 1.0
        return packed_norm(x, self.weight, bias, norm, eps=_eps(self), centred=centred, fmt=fmt, gain=gain)

    return forward


def _eps(norm: Any) -> Any:
    return getattr(norm, "eps", getattr(norm, "variance_epsilon", None))


def _activation(mlp: Any) -> Any:
    """The activation function of an MLP of :data:`MLPS`; ``None`` where it is more than a function of the gate."""
    if MLPS[qualified_name(own_class(mlp))] is _joint:
        return F.silu if mlp.activation == "swiglu" else None
    return getattr(mlp, "act_fn", None) or getattr(mlp, "act", None)


def _activation_kind(act: Any) -> ActivationKind | None:
    """Which function ``act`` is: a torch module or function, LLM Foundry's ``partial`` of one, or transformers' classes.

    Not relu: its backward asks for the sign of its input, which packing near zero loses. Hooks pack its output instead.
    """
    keywords: dict[str, Any] = {}
    if isinstance(act, functools.partial):
        if act.args:
            return None
        act, keywords = act.func, act.keywords
    if type(act) is nn.GELU:
        keywords, act = {"approximate": act.approximate}, F.gelu
    if act is F.gelu:
        return "gelu_tanh" if keywords.get("approximate") == "tanh" else "gelu"
    if act is F.silu:
        return "silu"
    name = _known(act) if isinstance(act, nn.Module) else None
    return None if name is None else _ACTIVATIONS.get(name)
