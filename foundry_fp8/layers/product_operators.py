"""The operators that multiply matrices: what the backends and torch's own layers call.

One table for all who must know them: what selective checkpointing keeps, what a recompute takes from there (HFU), what a plan prices.
``tests/layers/test_product_operators.py`` holds it against what the layers call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foundry_fp8.compat.fake_tensor import FLASH_ATTENTION

__all__ = ["ATTENTION", "LINEAR", "flop_formulas"]

LINEAR = (
    "aten.mm",
    "aten.addmm",
    "aten.linear",
    "aten._scaled_mm",
    "aten._scaled_mm_v2",  # torch.nn.functional.scaled_mm, torch 2.10 and later
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
    "aten._scaled_grouped_mm_v2",
    "foundry_fp8.tensorwise_gemm",
    "foundry_fp8.blockwise_gemm",
)
"""Of linear layers and experts. A release of torch may lack some."""

ATTENTION = (
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "flash_attn._flash_attn_forward",
    "flash_attn._flash_attn_varlen_forward",
    "foundry_fp8.attention_forward",
)
"""Of attention, forward."""


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """FLOPs of operators that torch counts as nothing, for ``FlopCounterMode``: at bfloat16's rate, so FP8 counts half of its own.

    Takes shapes in place of tensors, as ``FlopCounterMode`` passes them.
    """
    flash, flash_backward = FLASH_ATTENTION
    found: dict[Any, Callable[..., int]] = {
        # S and PV; in backward S, dP, dQ, dK and dV.
        flash: lambda q, k, *_, **__: 4 * _scores(q, k),
        flash_backward: lambda _, q, k, *__, **___: 10 * _scores(q, k),
    }
    half_rate: dict[str, Callable[..., int]] = {
        "aten._scaled_mm": _multiplications,
        "aten._scaled_mm_v2": _multiplications,
        "aten._scaled_grouped_mm": _multiplications,
        "aten._scaled_grouped_mm_v2": _multiplications,
        "aten._grouped_mm": lambda a, b, *_, **__: 2 * _multiplications(a, b),
        "foundry_fp8.tensorwise_gemm": lambda a, _, b, *__, **___: math.prod(a) * b[0],
        "foundry_fp8.blockwise_gemm": lambda a, _, b, *__, **___: math.prod(a) * b[0],
        "foundry_fp8.attention_forward": lambda *args, **_: 2 * _native_scores(args[10]),
        "foundry_fp8.attention_backward": lambda *args, **_: 5 * _native_scores(args[17]),
    }
    for name, formula in half_rate.items():
        namespace, _, operator = name.partition(".")
        packet = getattr(getattr(torch.ops, namespace), operator, None)  # ours once their module is imported
        if packet is not None:
            found[packet] = formula
    return found


def _multiplications(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """Of ``a @ b``, or of the products of groups, which divide one side of one of them."""
    batched = len(a) == 3 and len(b) == 2  # [groups, R, C] @ [C, columns of all groups]
    return (math.prod(a[1:]) if batched else math.prod(a)) * b[-1]


def _scores(q: Sequence[int], k: Sequence[int]) -> int:
    """Multiplications of ``Q K^T``; nothing is masked, as in torch's own formulas."""
    batch, heads, queries, head_dim = q
    return batch * heads * queries * k[2] * head_dim


def _native_scores(sizes: Sequence[int]) -> int:
    batch, heads, _, tokens, head_dim = sizes
    return batch * heads * tokens * tokens * head_dim
