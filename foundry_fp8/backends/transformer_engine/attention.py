"""FP8 attention through ``te.DotProductAttention``, that is, through cuDNN's fused kernel, with our delayed-scaling state.

As for the linears (:mod:`.delayed`): TE's quantisers are pointed at our scales and amaxes, and the TE module, which has no
parameters, hangs in the ``__dict__`` of ours and is kept out of TE's global buffers.

Source: TE 2.4, 2.8 and 2.20, ``pytorch/attention/dot_product_attention/dot_product_attention.py`` and
``pytorch/cpp_extensions/fused_attn.py`` (``META_QKV`` and so on).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_fp8.backends.attention_requirements import (
    AttentionMachine,
    AttentionShape,
    attention_requirement,
    call_requirement,
    cudnn_recipe_reason,
)
from foundry_fp8.backends.transformer_engine.delayed import bind, keep_out_of_global_buffers
from foundry_fp8.backends.transformer_engine.library import library
from foundry_fp8.backends.transformer_engine.recipes import te_recipe_of
from foundry_fp8.config.versions import release
from foundry_fp8.layers.attention import (
    AttentionBackend,
    AttentionInputs,
    AttentionRecipe,
    FP8DotProductAttention,
    GradScores,
)
from foundry_fp8.layers.backend import Availability
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["TransformerEngineAttention", "attention_machine"]

_ATTRIBUTE = "_te_attention"
_PLACES = {
    "qkv": ("scaling_fwd", "META_QKV"),
    "s": ("scaling_fwd", "META_S"),
    "o": ("scaling_fwd", "META_O"),
    "do": ("scaling_bwd", "META_DO"),
    "dp": ("scaling_bwd", "META_DP"),
    "dqkv": ("scaling_bwd", "META_DQKV"),
}
"""Slot -> where TE keeps its quantiser, by the names of TE's own constants."""


def attention_machine(device: torch.device) -> AttentionMachine:
    """The facts of a CUDA device and of this process. Transformer Engine can be imported."""
    packed = torch.backends.cudnn.version() or 0  # 90501 is 9.5.1
    allowed = int(os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"))  # as TE reads it
    return AttentionMachine(
        capability=torch.cuda.get_device_capability(device),
        cudnn=(packed // 10000, packed // 100 % 100, packed % 100),
        te=release(library().version),
        deterministic=not allowed or torch.are_deterministic_algorithms_enabled(),
    )


class TransformerEngineAttention(AttentionBackend):
    """FP8 attention through cuDNN's fused kernel."""

    name: ClassVar[str] = "transformer_engine"

    def recipe_reason(self, recipe: Recipe, grad_scores: GradScores = "fp8") -> str | None:
        """The delayed recipe alone, with every gradient in FP8."""
        return cudnn_recipe_reason(recipe, grad_scores)

    def module_reason(self, recipe: AttentionRecipe, head_dim: int | None) -> str | None:
        """What the current GPU refuses for every call."""
        if head_dim is None or not torch.cuda.is_available():
            return None
        shape = AttentionShape(head_dim=head_dim, sequence=128)
        return attention_requirement(recipe, shape, attention_machine(torch.device("cuda"))).reason or None

    def call_reason(self, module: FP8DotProductAttention, given: AttentionInputs) -> Availability:
        """See :meth:`AttentionBackend.call_reason`. Waits for the device once a forward where there is padding or documents."""
        assert module.recipe is not None
        q, k, v, mask, *_ = given
        found = call_requirement(module.recipe, q, k, v, mask.simplified, attention_machine(q.device))
        if found.ok and q.dtype not in (torch.bfloat16, torch.float16):
            return Availability(False, f"its inputs are {q.dtype}", "Set precision: amp_bf16.")
        return found

    @torch.compiler.disable
    def attend(self, module: FP8DotProductAttention, given: AttentionInputs) -> Tensor:
        """See :meth:`AttentionBackend.attend`. Raises as :meth:`AttentionBackend.check_call`."""
        self.check_call(module, given)
        q, k, v, mask, softmax_scale, dropout_p = given
        mask = mask.simplified
        assert module.recipe is not None
        te_recipe = _with_attention(module.recipe)
        dpa = _te_module(module, q, k, softmax_scale, dropout_p)
        dpa.train(module.training)
        # Always given: the default of a module that was built causal is a causal window, which TE mends with a warning.
        window = (-1, 0 if mask.causal else -1) if mask.window is None else (mask.window[0], 0)
        with library().autocast(te_recipe):
            dpa.init_fp8_metadata(
                num_gemms=3
            )  # makes the quantisers; the forward's own call then returns at once
            constants = importlib.import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
            record = module.training and torch.is_grad_enabled()
            for name, slot in module.slots.items():  # TE's quantisers take our scales and amaxes
                group, constant = _PLACES[name]
                quantizer = dpa.quantizers[group][getattr(constants, constant)]
                bind(quantizer, f"{name} of the attention", slot, record or group == "scaling_bwd")
            out: Tensor = dpa(
                *(x.transpose(1, 2).contiguous() for x in (q, k, v)),  # "bshd"
                attn_mask_type="causal" if mask.causal else "no_mask",
                window_size=window,
            )
        out = out.unflatten(-1, (q.shape[1], -1))
        return out.transpose(1, 2)


@functools.lru_cache(maxsize=32)
def _with_attention(recipe: Recipe) -> Any:
    return dataclasses.replace(te_recipe_of(recipe), fp8_dpa=True)


def _te_module(
    module: FP8DotProductAttention, q: Tensor, k: Tensor, softmax_scale: float, dropout_p: float
) -> Any:
    """The ``te.DotProductAttention`` for these shapes; made once."""
    made = module.__dict__.setdefault(_ATTRIBUTE, {})
    key = (q.shape[1], k.shape[1], q.shape[3], softmax_scale, dropout_p)
    if key not in made:
        heads, kv_heads, head_dim, *_ = key
        made[key] = library().te.DotProductAttention(
            heads,
            head_dim,
            num_gqa_groups=kv_heads,
            attention_dropout=dropout_p,
            qkv_format="bshd",
            softmax_scale=softmax_scale,
        )
        keep_out_of_global_buffers(made[key], library())
    return made[key]
