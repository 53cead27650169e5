"""What FP8 attention through cuDNN needs of a machine and of a model, as rules over plain facts.

cuDNN's fused kernels are what trains, called by Transformer Engine (whose other attention backends have no FP8 backward) or by the native
backend.

Source: TE 2.20, ``pytorch/attention/dot_product_attention/utils.py`` (``get_attention_backend``) and
``common/fused_attn/fused_attn.cpp`` (``nvte_get_fused_attn_backend``); for determinism the same file of tags v2.4 to v2.18.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from foundry_fp8.config.versions import dotted
from foundry_fp8.layers.attention import GradScores
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.backend import Availability
from foundry_fp8.numerics.recipes import Recipe

__all__ = [
    "AttentionMachine", "AttentionShape", "attention_requirement", "attention_shape", "call_requirement",
    "cudnn_recipe_reason",
]  # fmt: skip

BROKEN_CUDNN = (9, 10, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMachine:
    """What the rules need to know of the machine and the process."""

    capability: tuple[int, int]
    """Compute capability of the GPU."""
    cudnn: tuple[int, ...]
    """cuDNN that is loaded."""
    te: tuple[int, ...] | None = None
    """Transformer Engine; ``None`` where something else calls cuDNN."""
    deterministic: bool = False
    """Whether only deterministic kernels may run: Composer's ``deterministic_mode``, or NVTE_ALLOW_NONDETERMINISTIC_ALGO=0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What the rules need to know of a model's attention."""

    head_dim: int
    sequence: int
    """Longest sequence, in tokens."""
    causal: bool = True
    window: bool = False
    """Whether there is a sliding window."""
    bias: bool = False
    """Whether something is added to the logits (ALiBi, a dense mask)."""
    documents: bool = False
    """Whether packed documents are kept apart."""
    padding: bool = False
    """Whether the batch is padded."""


def attention_requirement(recipe: Recipe, shape: AttentionShape, machine: AttentionMachine) -> Availability:
    """Whether cuDNN trains this attention in FP8; if not, why, and what would change that.

    Args:
        recipe: The attention's recipe.
        shape: The model's attention.
        machine: Where it is to run.
    """
    capability, cudnn = machine.capability, machine.cudnn
    gpu = f"the GPU has compute capability {capability[0]}.{capability[1]}"
    otherwise = "Set attention: false, or backend: emulated to check numerics."

    def no(reason: str, remedy: str = otherwise) -> Availability:
        return Availability(False, reason, remedy)

    refused = cudnn_recipe_reason(recipe)
    if refused is not None:
        return no(refused, "Set attention: {recipe: delayed}, or attention: false.")
    if capability < (9, 0) or capability >= (12, 0):
        return no(f"{gpu}, and FP8 attention runs on 9.0 to 11.x")
    if shape.bias or shape.documents:
        what = "something added to the logits (a bias, a dense mask)" if shape.bias else "document masks"
        return no(f"cuDNN's FP8 attention has no form for {what}")
    if shape.padding:
        return no("the batch is padded", "Pack the sequences, or set attention: false.")
    if machine.te is None and not shape.causal:
        return no(
            "without a causal mask cuDNN's frontend gave wrong results (on an H200, 53 % off for two sequences of 640 tokens)"
        )
    if cudnn == BROKEN_CUDNN:
        return no("cuDNN 9.10.0 is broken for FP8 attention", "Install cuDNN 9.10.1 or later.")
    if machine.deterministic and (cudnn < (9, 19) or (machine.te is not None and machine.te < (2, 13))):
        needs, here = (
            ("", "") if machine.te is None else (" and Transformer Engine 2.13", f" and {dotted(machine.te)}")
        )
        return no(
            f"deterministic algorithms are asked for, and FP8 attention has them from cuDNN 9.19{needs} on "
            f"(here {dotted(cudnn)}{here})",
            f"Set deterministic_mode: false. {otherwise}",
        )
    if shape.window and (machine.te is None or capability < (10, 0) or cudnn < (9, 21)):
        return no(
            f"{gpu} with cuDNN {dotted(cudnn)}, and a sliding window in FP8 needs 10.0 and cuDNN 9.21, and Transformer Engine"
        )
    if capability < (10, 0):
        if shape.head_dim != 128:
            return no(f"head_dim is {shape.head_dim}, and on Hopper it has to be 128")
        if cudnn >= (9, 7) or (cudnn >= (9, 2, 1) and shape.sequence % 128 == 0):
            return Availability(True)
        return no(
            f"cuDNN {dotted(cudnn)} trains FP8 attention from 9.2.1 on, and before 9.7 only for sequences that are "
            f"multiples of 128 (here {shape.sequence})",
            f"Install cuDNN 9.7 or later. {otherwise}",
        )
    if shape.head_dim > 128 or shape.head_dim % 16:
        return no(f"head_dim is {shape.head_dim}, and it has to be a multiple of 16 up to 128")
    if cudnn < (9, 7):
        return no(f"cuDNN {dotted(cudnn)} is loaded, and Blackwell needs 9.7", "Install cuDNN 9.7 or later.")
    return Availability(True)


def cudnn_recipe_reason(recipe: Recipe, grad_scores: GradScores = "fp8") -> str | None:
    """Why cuDNN's kernels cannot run ``recipe`` with such gradients of the logits, or ``None``.

    They round S, O, dP, dQ, dK and dV inside, with scales that are known before: delayed scaling's. Transformer Engine, too, takes the current
    recipe on Blackwell alone.
    """
    if grad_scores != "fp8":
        return f"cuDNN's kernel rounds the gradient of the logits to FP8, and grad_scores is {grad_scores}"
    if recipe.uses_history:
        return None
    return f"through cuDNN FP8 attention runs with the delayed recipe alone, not {recipe.name}"


def attention_shape(mask: AttentionMask, *, head_dim: int, sequence: int) -> AttentionShape:
    """What the rules need to know of one call."""
    return AttentionShape(
        head_dim=head_dim,
        sequence=sequence,
        causal=mask.causal,
        window=mask.window is not None,
        bias=mask.bias is not None,
        documents=mask.documents is not None,
        padding=mask.key_padding is not None,
    )


def call_requirement(
    recipe: Recipe, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, machine: AttentionMachine
) -> Availability:
    """:func:`attention_requirement` of one call, and what else its tensors (as :meth:`AttentionBackend.attend` takes them) have to be."""
    shape = attention_shape(mask, head_dim=q.shape[3], sequence=q.shape[2])
    found = attention_requirement(recipe, shape, machine)
    if not found.ok:
        return found
    if q.shape[2] != k.shape[2]:
        return Availability(False, "it has fewer queries than keys", "Set evaluate: high_precision.")
    if v.shape[3] != q.shape[3]:
        reason = f"its values have size {v.shape[3]}, its queries {q.shape[3]}"
        return Availability(False, reason, "Set attention: false.")
    if mask.window is not None and (not mask.causal or mask.window[0] is None):
        return Availability(False, "its window is not causal", "Set attention: false.")
    return found
