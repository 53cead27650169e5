"""Which modules have a fused form that keeps only its input, and giving it to them.

A module gets its fused form by becoming an instance of a subclass of its own class, as ``torch.nn.utils.parametrize`` and
FSDP2's ``fully_shard`` do it: parameters, names, hooks, ``isinstance`` and what FSDP holds of it stay as they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from foundry_fp8.activations.compression.cross_entropy import lean_cross_entropy
from foundry_fp8.activations.compression.fused_activation import (
    ActivationKind,
    packed_activation,
    packed_activation_linear,
)
from foundry_fp8.activations.compression.fused_norm import packed_norm
from foundry_fp8.model_structure.wrappers import own_class
from foundry_fp8.numerics.packed import PackFormat

__all__ = ["fuse_losses", "fuse_mlp", "fuse_norm", "unfuse"]


def _separate(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return mlp.gate_proj(x), mlp.up_proj(x)


def _joint(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
    return gate, up


def _ungated(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return mlp.up_proj(x), None


_MLPS = {
    "LlamaMLP": _separate,
    "MistralMLP": _separate,
    "Qwen2MLP": _separate,
    "Qwen3MLP": _separate,
    "GemmaMLP": _separate,
    "Gemma2MLP": _separate,
    "OlmoMLP": _separate,
    "Olmo2MLP": _separate,
    "MPTGLU": _separate,
    "MPTMLP": _ungated,
    "fog.MLP": _ungated,
    "fog.FogMPTFFN": _ungated,
    "fog.GatedMLP": _joint,
}
_RMS = (
    "LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Olmo2RMSNorm", "RMSNorm",
    "LPRMSNorm", "fog.RMSNorm",
)  # fmt: skip
_LAYER = ("LayerNorm", "LPLayerNorm")
"""By exact class name: a subclass or a look-alike (Gemma's norm multiplies by 1 + weight) may compute something else."""


def _name(module: nn.Module) -> str:
    """The class's name; FOG's with its package, as anybody may have an ``MLP``."""
    cls = own_class(module)
    return f"fog.{cls.__name__}" if cls.__module__.startswith("foundry_fp8.models.fog.") else cls.__name__


def fuse_mlp(module: nn.Module, fmt: PackFormat | None) -> bool:
    """Let a known gated or plain MLP keep the inputs of its activation function, and no more. False if it is unknown."""
    project = _MLPS.get(_name(module))
    kind = None if project is None else _activation_kind(_activation(module))
    if project is None or kind is None:
        return False

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = project(self, x)
        act, down = _activation(self), self.down_proj
        slopes = act.slopes() if kind == "xielu" else None
        # A plain linear is a function of its parameters; anything else (FP8, FSDP, LoRA, hooks) has to be called.
        if type(down) is nn.Linear and not (down._forward_hooks or down._forward_pre_hooks):
            y = packed_activation_linear(gate, up, down.weight, down.bias, act, kind, fmt, slopes=slopes)
        else:
            y = down(packed_activation(gate, up, act, kind, fmt, slopes=slopes))
        post_norm = getattr(self, "post_norm", None)
        return y if post_norm is None else post_norm(y)

    _become(module, forward)
    return True


def _activation(mlp: Any) -> Any:
    """The activation function of an MLP of :data:`_MLPS`; ``None`` where it is more than a function of the gate."""
    if _name(mlp) == "fog.GatedMLP":
        return F.silu if mlp.activation == "swiglu" else None
    return getattr(mlp, "act_fn", None) or getattr(mlp, "act", None)


def fuse_norm(module: nn.Module, fmt: PackFormat | None) -> bool:
    """Let a known LayerNorm or RMSNorm keep its input, and no more. False if it is unknown."""
    cls = type(module)
    name = _name(module)
    centred = name in _LAYER
    if not centred and name not in _RMS:
        return False
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    shape = getattr(module, "normalized_shape", (0,))
    if eps is None or len(shape) != 1:
        return False

    def forward(self: Any, x: Tensor) -> Tensor:
        return packed_norm(
            x,
            self.weight,
            getattr(self, "bias", None),
            functools.partial(cls.forward, self),
            eps=eps,
            centred=centred,
            fmt=fmt,
            gain=getattr(self, "gain", 1.0) if self.weight is None else 1.0,
        )

    _become(module, forward)
    return True


def fuse_losses(model: nn.Module) -> Iterator[tuple[str, Callable[[], None]]]:
    """Let cross-entropies keep their logits and recompute the softmax: ``(name, undo)`` of each.

    They are ``nn.CrossEntropyLoss`` modules over class indices (LLM Foundry's MPT), and the ``loss_function`` of Hugging
    Face causal models, as far as their forward asks for it.
    """
    for name, module in model.named_modules():
        if type(module) is nn.CrossEntropyLoss and module.weight is None and not module.label_smoothing:
            _become(module, _cross_entropy_of_module)
            yield name, functools.partial(unfuse, module)
        elif getattr(module, "loss_type", None) == "ForCausalLM" and _calls_loss_function(module):
            from transformers.loss.loss_utils import ForCausalLMLoss

            owner: Any = module
            if owner.loss_function is ForCausalLMLoss:
                owner.loss_function = causal_lm_loss
                yield f"{name}.loss_function".lstrip("."), functools.partial(delattr, owner, "_loss_function")


def _calls_loss_function(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def _cross_entropy_of_module(self: Any, logits: Tensor, targets: Tensor) -> Tensor:
    return lean_cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction=self.reduction)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The ``ForCausalLMLoss`` of transformers without its float32 copy of the logits.

    Args:
        logits: ``[..., T, vocab_size]``.
        labels: ``[..., T]``, not yet shifted.
        vocab_size: Columns of the logits.
        num_items_in_batch: What the sum is divided by; the mean over the labels without it.
        ignore_index: Label without loss.
        shift_labels: Labels that are shifted already.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = lean_cross_entropy(
        logits.view(-1, vocab_size),
        shift_labels.reshape(-1).to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def unfuse(module: nn.Module) -> None:
    """Give a fused module the class back that it had."""
    if "_unfused" in type(module).__dict__:
        module.__class__ = type(module)._unfused  # type: ignore[attr-defined]


def _become(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    cls = type(module)
    namespace = {"forward": forward, "__module__": cls.__module__, "_unfused": cls}
    module.__class__ = type(f"Packed{cls.__name__}", (cls,), namespace)


def _activation_kind(act: Any) -> ActivationKind | None:
    """Which function ``act`` is: a torch module or function, LLM Foundry's ``partial`` of one, or transformers' classes.

    Not relu: its backward asks for the sign of its input, which packing near zero loses. Hooks pack its output instead.
    """
    keywords: dict[str, Any] = {}
    if isinstance(act, functools.partial):
        if act.args:
            return None
        act, keywords = act.func, act.keywords
    if isinstance(act, nn.GELU):
        keywords = {"approximate": act.approximate}
    name = type(act).__name__
    if isinstance(act, nn.Module) and _name(act) == "fog.XIELU":
        return "xielu"
    if act is F.silu or name in ("SiLU", "SiLUActivation"):
        return "silu"
    if act is F.gelu or isinstance(act, nn.GELU):
        return "gelu_tanh" if keywords.get("approximate") == "tanh" else "gelu"
    if name == "GELUActivation":
        return "gelu"
    return "gelu_tanh" if name in ("PytorchGELUTanh", "NewGELUActivation") else None
