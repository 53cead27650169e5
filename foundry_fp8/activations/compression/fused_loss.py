"""Which cross-entropies can keep their logits and make the softmax again, and letting them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from foundry_fp8.activations.compression.cross_entropy import lean_cross_entropy
from foundry_fp8.model_structure.fused_classes import fuse, unfuse
from foundry_fp8.model_structure.wrappers import names_in_forward
from foundry_fp8.numerics.packed import PackFormat

__all__ = ["causal_lm_loss", "fuse_losses"]


def fuse_losses(model: nn.Module) -> Iterator[tuple[str, Callable[[], None]]]:
    """Let cross-entropies keep their logits and recompute the softmax: ``(name, undo)`` of each.

    They are ``nn.CrossEntropyLoss`` modules over class indices (LLM Foundry's MPT), and the ``loss_function`` of Hugging
    Face causal models, as far as their forward asks for it.
    """
    for name, module in model.named_modules():
        if type(module) is nn.CrossEntropyLoss and module.weight is None and not module.label_smoothing:
            fuse(module, _cross_entropy, None)
            yield name, functools.partial(unfuse, module)
        elif getattr(module, "loss_type", None) == "ForCausalLM":
            from transformers.loss.loss_utils import ForCausalLMLoss

            owner: Any = module
            if "loss_function" in names_in_forward(module) and owner.loss_function is ForCausalLMLoss:
                owner.loss_function = causal_lm_loss
                yield f"{name}.loss_function".lstrip("."), functools.partial(delattr, owner, "_loss_function")


def _cross_entropy(cls: type[nn.Module], fmt: PackFormat | None) -> Callable[..., Tensor]:
    def forward(self: Any, logits: Tensor, targets: Tensor) -> Tensor:
        return lean_cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction=self.reduction)

    return forward


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
