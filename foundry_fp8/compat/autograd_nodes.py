"""Reads from a node of the autograd graph the function that made it, and some of what it saved.

Cause: torch has what a node saved as attributes ``_saved_*``
(https://pytorch.org/docs/stable/notes/autograd.html#saved-tensors), named after the arguments of its backward in
``tools/autograd/derivatives.yaml``, and the class of a Python function's node as ``_forward_cls``. None of these names is public
API. Remove this file when they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_fp8.config.versions import moved

__all__ = ["added_to_scores", "exponent_of", "function_of"]

_ADDED = {
    "ScaledDotProductFlashAttentionForCpuBackward0": "_saved_attn_mask",
    "ScaledDotProductEfficientAttentionBackward0": "_saved_attn_bias",
    "ScaledDotProductCudnnAttentionBackward0": "_saved_attn_bias",
    "ScaledDotProductFusedAttentionOverrideableBackward0": "_saved_attn_bias",
    "EfficientAttentionBackward0": "_saved_bias",
}
"""Attention node -> where it saved the mask or bias that it adds to its scores. Other attention nodes take none."""


_NEEDED = ". By it foundry_fp8 knows what activation_compression may round"


def _of(node: Any, name: str) -> Any:
    if not hasattr(node, name):
        raise moved(f"no longer has {name} on {node.name()}{_NEEDED}", "autograd_nodes")
    return getattr(node, name)


def exponent_of(node: Any) -> float:
    """The exponent of a ``PowBackward0``."""
    exponent: float = _of(node, "_saved_exponent")
    return exponent


def added_to_scores(node: Any) -> Tensor | None:
    """The mask or bias that an attention's node saved, which is added to the scores; ``None`` if there is none."""
    name = _ADDED.get(node.name())
    added: Tensor | None = None if name is None else _of(node, name)
    return added


def function_of(node: Any) -> Any:
    """The ``autograd.Function`` class that made the node; ``None`` for torch's own nodes."""
    return getattr(node, "_forward_cls", None)


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


with torch.inference_mode(False), torch.enable_grad():  # checked at import
    _made = _Probe.apply(torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True))
    if function_of(_made.grad_fn) is not _Probe:
        raise moved(
            f"no longer has _forward_cls on the nodes of autograd functions{_NEEDED}", "autograd_nodes"
        )
