"""RoPE with Llama 3.1's frequency scaling, from numbers alone: no buffers, so nothing to lose on the meta device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

__all__ = ["rope_frequencies", "rope_tables", "rotate"]


def rope_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, float] | Literal[False]
) -> list[float]:
    """The ``head_dim / 2`` angular frequencies, in radians a position.

    Long wavelengths (above ``original_max_position_embeddings / low_freq_factor``) are slowed by ``factor``, short ones
    (below ``... / high_freq_factor``) stay, those between are blended linearly.

    Source:
        Llama 3.1's reference implementation (``apply_scaling`` in meta-llama's ``models/llama3``).
    """
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is False:
        return frequencies
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    scaled = []
    for frequency in frequencies:
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(frequency * (keep + (1 - keep) / scaling["factor"]))
    return scaled


def rope_tables(positions: Tensor, frequencies: list[float]) -> tuple[Tensor, Tensor]:
    """``(cos, sin)``, float32 [b, s, 1, head_dim / 2], of integer ``positions`` [b, s]."""
    table = torch.tensor(frequencies, dtype=torch.float32, device=positions.device)
    angles = positions.float().unsqueeze(-1) * table
    return angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs ``(x_i, x_{i + head_dim/2})``; ``x``: [b, s, heads, head_dim]. Norms are kept. Same dtype."""
    cos, sin = tables
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
