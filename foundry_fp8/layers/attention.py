"""FP8 dot-product attention: the module that serves an attention of the model, and what its backends are asked."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.backend import Availability
from foundry_fp8.layers.delayed_scaling import DelayedSlot
from foundry_fp8.layers.ledger import GemmLedger, Precision
from foundry_fp8.layers.second_derivative import refuse_second_derivative
from foundry_fp8.numerics.formats import E4M3, Float8Format
from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling, Recipe, recipe_name

__all__ = [
    "GRADIENTS", "SLOTS", "AttentionBackend", "AttentionInputs", "AttentionProbe", "AttentionRecipe",
    "FP8DotProductAttention", "GradScores", "attention_format", "attention_slots", "by_tokens", "no_attention_form",
]  # fmt: skip

AttentionRecipe = DelayedScaling | CurrentScaling
GradScores = Literal["fp8", "bfloat16"]
"""What the gradient of the logits (dP here, dS in FlashAttention's papers) is rounded to before the products that make dQ and dK."""
AttentionProbe = Callable[[str, Tensor, Quantized], None]
"""Called with each tensor that is quantised: its name (``q``, ..., ``dv``), the hp tensor (or the block of it), the result."""

SLOTS = {
    "q": "qkv",
    "k": "qkv",
    "v": "qkv",
    "s": "s",
    "o": "o",
    "do": "do",
    "dp": "dp",
    "dq": "dqkv",
    "dk": "dqkv",
    "dv": "dqkv",
}
"""The delayed-scaling slot of each tensor. Q, K and V share one scale, as in TE (one ``QKV_quantizer``)."""

GRADIENTS = ("do", "dp", "dqkv")


def no_attention_form(recipe: Recipe) -> str | None:
    """Why no backend of ours has FP8 attention for ``recipe``, or ``None``: delayed and current scaling have a form."""
    if recipe.kind == "tensor":
        return None
    scales = " with scales of rows" if recipe.by_row else ""
    return f"the {recipe.name} recipe{scales} has no FP8 attention (Transformer Engine has none either)"


def attention_slots(recipe: AttentionRecipe) -> tuple[str, ...]:
    """The slots that need delayed-scaling state: all of them, or S and dP alone under current scaling, as in TE."""
    return ("qkv", "s", "o", "do", "dp", "dqkv") if recipe.uses_history else ("s", "dp")


def attention_format(recipe: AttentionRecipe, slot: str) -> Float8Format:
    """The number format of one slot: E4M3; that of gradients for dO, dP and dQKV."""
    return recipe.format("dy") if slot in GRADIENTS else E4M3


def by_tokens(x: Tensor) -> Tensor:
    """[b, heads, s, d] as a linear's rows, which is what kernels quantise and monitors see: [b * s, heads * d]."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], -1)


class AttentionInputs(NamedTuple):
    """One call, as :meth:`FP8DotProductAttention.forward` takes it."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask
    softmax_scale: float
    dropout_p: float = 0.0


class AttentionBackend(abc.ABC):
    """Runs FP8 attention. One instance serves a whole model."""

    name: ClassVar[str]

    @abc.abstractmethod
    def recipe_reason(self, recipe: Recipe, grad_scores: GradScores = "fp8") -> str | None:
        """Why it cannot run ``recipe`` with such gradients of the logits, or ``None`` if it can."""

    def module_reason(self, recipe: AttentionRecipe, head_dim: int | None) -> str | None:
        """Why attention of this head size cannot run here at all, or ``None``; the rest is checked when it is called."""
        return None

    def self_check(  # noqa: B027 - optional
        self, recipe: AttentionRecipe, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Prove the kernels for one head size on this machine, before anything is changed.

        Raises:
            RuntimeError: One of them is wrong.
        """

    @abc.abstractmethod
    def call_reason(self, module: FP8DotProductAttention, given: AttentionInputs) -> Availability:
        """Whether it takes this call; if not, why, and what would change that."""

    def check_call(self, module: FP8DotProductAttention, given: AttentionInputs) -> None:
        """Raise :class:`RuntimeError`, with the reason and the way out, where it does not take this call."""
        found = self.call_reason(module, given)
        if not found.ok:
            said = f"FP8 attention cannot run on the {self.name} backend: {found.reason}. {found.remedy}"
            raise RuntimeError(f"{module.fqn}: {said}")

    @abc.abstractmethod
    def attend(self, module: FP8DotProductAttention, given: AttentionInputs) -> Tensor:
        """The forward of ``module``, differentiable; the result as :meth:`FP8DotProductAttention.forward`."""


class FP8DotProductAttention(nn.Module):
    """Dot-product attention whose GEMMs, forward and backward, take FP8 operands. It has no parameters.

    Attributes:
        fqn: The name of the attention module that it serves.
        backend: Who runs it.
        recipe: What runs now; ``None`` is high precision, which the caller runs itself. See :meth:`set_recipe`.
        configured_recipe: What the conversion asked for.
        evaluate: What a forward in ``eval()`` mode runs in.
        grad_scores: What the gradient of the logits is rounded to.
        slots: The delayed-scaling state by slot (:func:`attention_slots`), from the conversion.
        ledger: The GEMMs that ran. Both GEMMs of the forward count as fprop, the four of the backward as dgrad.
        probe: Called with every tensor quantised while it is set; for monitors.
    """

    def __init__(
        self,
        *,
        fqn: str,
        recipe: AttentionRecipe,
        backend: AttentionBackend,
        evaluate: Literal["fp8", "high_precision"] = "high_precision",
        grad_scores: GradScores = "fp8",
    ) -> None:
        super().__init__()
        self.fqn = fqn
        self.backend = backend
        self.recipe: AttentionRecipe | None = recipe
        self.configured_recipe = recipe
        self.evaluate = evaluate
        self.grad_scores = grad_scores
        self.slots: Mapping[str, DelayedSlot] = {}
        self.ledger = GemmLedger()
        self.probe: AttentionProbe | None = None

    def set_recipe(self, recipe: AttentionRecipe | None) -> None:
        """Run ``recipe`` from the next forward on; ``None`` runs high precision.

        Raises:
            RuntimeError: Neither ``None``, nor current scaling, nor the recipe of the conversion.
        """
        if recipe is not None and recipe != self.configured_recipe and not self.can_run(recipe):
            raise RuntimeError(
                f"{self.fqn}: {recipe.name} is not what this attention was converted with "
                f"({self.configured_recipe.name}). Demote to high precision (where its backend runs it, also to current)."
            )
        self.recipe = recipe

    def can_run(self, recipe: Recipe, device: torch.device | None = None) -> bool:
        """Whether ``recipe`` can take the place of the configured one: current scaling, if the backend runs it."""
        return not recipe.uses_history and self.backend.recipe_reason(recipe, self.grad_scores) is None

    @property
    def runs_fp8(self) -> bool:
        """Whether a forward in the present mode runs in FP8."""
        return self.recipe is not None and (self.training or self.evaluate == "fp8")

    def amaxes(self) -> dict[str, Tensor]:
        """Where a call that begins now records, by slot. Not in evaluation; a recompute records no forward tensor (its input may
        have been packed since the first forward, and in a compiled graph recording twice changes nothing).
        """
        if not self.training:
            return {}
        again = not torch.compiler.is_compiling() and inside_backward()
        assert self.recipe is not None
        return {
            name: self.slots[name].amax
            for name in attention_slots(self.recipe)
            if name in GRADIENTS or not again
        }

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        softmax_scale: float,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attention in FP8, differentiable in q, k and v.

        Args:
            q: [b, heads, q, d], hp.
            k: [b, kv_heads, k, d], hp; ``kv_heads`` divides ``heads``.
            v: [b, kv_heads, k, d], hp.
            mask: What each query sees. A query that sees nothing gets zeros.
            softmax_scale: Multiplies the logits.
            dropout_p: Probability of dropping a probability; the caller passes 0 in evaluation.

        Returns:
            [b, heads, q, d], the dtype of ``q``.
        """
        if mask.bias is not None and mask.bias.requires_grad:
            raise RuntimeError(f"{self.fqn}: FP8 attention has no gradient for a trainable attention bias.")
        given = AttentionInputs(q, k, v, mask, softmax_scale, dropout_p)
        if torch.compiler.is_compiling():  # a compiled graph cannot keep Python counters
            return self.backend.attend(self, given)
        state = next(iter(self.slots.values())).state
        state.begin_layer(q.device, trains=self.training and torch.is_grad_enabled())
        rows, keys, d = q.shape[0] * q.shape[1] * q.shape[2], k.shape[2], q.shape[3]
        # Counted before it runs: a recompute stops inside it, once it has what the backward needs.
        for n, inner in ((keys, d), (d, keys)):  # P, O
            self.ledger.record("fprop", rows, n, inner, "fp8", recompute=inside_backward())
        out = self.backend.attend(self, given)
        forward = state.in_force()
        of_scores: Precision = "fp8" if self.grad_scores == "fp8" else "bf16"

        def record_backward(_: Tensor) -> None:
            refuse_second_derivative(self.fqn)
            state.begin_backward(forward)
            for n, inner in ((keys, d), (d, keys)):  # dS, dV
                self.ledger.record("dgrad", rows, n, inner, "fp8")
            for _name in ("dQ", "dK"):
                self.ledger.record("dgrad", rows, d, keys, of_scores)

        if out.requires_grad:
            out.register_hook(record_backward)
        return out

    def extra_repr(self) -> str:
        """What it runs."""
        return f"recipe={recipe_name(self.recipe)}" + (
            "" if self.grad_scores == "fp8" else f", grad_scores={self.grad_scores}"
        )
