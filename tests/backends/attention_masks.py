"""The kinds of masks that every backend of FP8 attention takes."""

import torch

from foundry_fp8.layers.attention_mask import AttentionMask


def common_masks(batch: int, length: int, device: str = "cpu") -> dict[str, AttentionMask]:
    """By name, for ``batch`` (at most 2) sequences of ``length``."""
    place = torch.arange(length, device=device).expand(batch, length)
    tokens = torch.tensor([[length], [length - 9]], device=device)[:batch]
    return {
        "full": AttentionMask(),
        "causal": AttentionMask(causal=True),
        "window": AttentionMask(causal=True, window=(7, 0)),
        "two-sided window": AttentionMask(window=(5, 3)),
        "documents": AttentionMask(causal=True, documents=place // 13),
        "padding": AttentionMask(causal=True, key_padding=place < tokens),
        "padding on the left": AttentionMask(causal=True, key_padding=place >= 5),
    }
