"""Attention: attended (query, key) pairs times head width.

``QK^T`` and ``PV`` of one layer cost ``2 * heads * (d_qk + d_v)`` FLOPs for each pair that the mask lets through, and
twice that in the backward pass. The pairs of one sequence of ``s`` tokens:

========================  ==========================
causal                    ``s (s + 1) / 2``
causal, window ``w < s``  ``w s - w (w - 1) / 2``
full                      ``s^2``
documents, chunks         the sum over them
========================  ==========================

Grouped queries change the K and V projections, not these GEMMs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.model_structure.blocks import transformer_blocks
from foundry_fp8.model_structure.names import clean_name, named_modules_clean
from foundry_fp8.observe.flops.gemms import first_int

__all__ = [
    "AttentionShape", "Mask", "attended_pairs", "attention_shapes", "documents_of", "in_chunks", "packed_pairs",
]  # fmt: skip


Mask = tuple[int | None, bool, bool, int | None]
"""``(window, causal, packed, chunk)``."""
RECURRENT = ("mamba", "ssm", "recurrent", "deltanet", "shortconv", "rwkv")
"""What classes of blocks are called that mix tokens without attention, in hybrid models."""


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One attention layer.

    Attributes:
        name: The module's name, without wrapper parts.
        heads: Query heads.
        d_qk: Width of a query or key head.
        d_v: Width of a value head.
        window: Keys that a query sees, itself included; ``None`` where there is no window.
        causal: A query sees no later key.
        packed: The mask keeps documents apart where the batch has them (:func:`documents_of`).
        chunk: Each so many tokens attend among themselves (Llama 4); ``None`` where there are no chunks.
    """

    name: str
    heads: int
    d_qk: int
    d_v: int
    window: int | None = None
    causal: bool = True
    packed: bool = False
    chunk: int | None = None

    @property
    def mask(self) -> Mask:
        """Equal for layers that attend the same pairs."""
        return self.window, self.causal, self.packed, self.chunk

    def forward_flops(self, pairs: float) -> float:
        """FLOPs of the forward pass for ``pairs`` attended pairs. The backward pass costs twice as much."""
        return 2.0 * self.heads * (self.d_qk + self.d_v) * pairs


def attended_pairs(
    length: int, window: int | None = None, causal: bool = True, chunk: int | None = None
) -> int:
    """Attended pairs of one sequence of ``length`` tokens."""
    if chunk is not None and chunk < length:
        whole, rest = divmod(length, chunk)
        return whole * attended_pairs(chunk, window, causal) + attended_pairs(rest, window, causal)
    if not causal:
        return length * length
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * length - window * (window - 1) // 2


def packed_pairs(
    window: int | None, *, documents: Tensor | None = None, mask: Tensor | None = None, causal: bool = True
) -> Tensor:
    """Attended pairs of a batch whose rows hold several documents, padding, or both.

    Args:
        window: As in :class:`AttentionShape`.
        documents: ``[B, S]``, integers, constant over a document. ``None``: one document a row.
        mask: ``[B, S]``, true (or 1) at real tokens. Padding neither attends nor is attended. ``None``: no padding.
        causal: As in :class:`AttentionShape`.

    Returns:
        0-d int64, on the device of the input, so that nothing waits.
    """
    like = documents if documents is not None else mask
    if like is None:
        raise ValueError("packed_pairs needs documents or mask.")
    real = torch.ones_like(like, dtype=torch.bool) if mask is None else mask.bool()
    index = torch.arange(like.shape[1], device=like.device).expand_as(like)
    if documents is None:
        first = torch.zeros_like(index)
    else:
        starts = torch.ones_like(real)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        first = torch.where(starts, index, 0).cummax(dim=1).values
    before = real.long().cumsum(dim=1)  # real tokens up to here, over the row
    at_start = before.gather(1, first) - real.long().gather(1, first)
    position = before - at_start  # 1 at a document's first real token
    if causal:
        seen = position if window is None else position.clamp(max=window)
        return (seen * real).sum()
    ends = torch.ones_like(real)
    ends[:, :-1] = first[:, 1:] != first[:, :-1]
    return (position * ends).square().sum()


def documents_of(batch: Mapping[str, Any], rows: int, length: int) -> Tensor | None:
    """``[B, S]``, constant over a document, from ``sequence_id``, flash attention's ``cu_seq_lens_q``, or positions that begin again."""
    ends, positions = batch.get("cu_seq_lens_q", batch.get("cu_seqlens")), batch.get("position_ids")
    if batch.get("sequence_id") is None and ends is not None:
        index = torch.arange(rows * length, device=ends.device, dtype=ends.dtype)
        return torch.bucketize(index, ends.flatten()[1:], right=True).view(rows, length)
    if batch.get("sequence_id") is None and positions is not None and positions.shape[-1] == length:
        return (positions == 0).long().cumsum(-1).view(-1, length).expand(rows, length)
    return batch.get("sequence_id")


def in_chunks(documents: Tensor | None, like: Tensor, chunk: int | None) -> Tensor | None:
    """``documents`` cut into chunks of each row; ``like``: ``[B, S]``."""
    if chunk is None:
        return documents
    chunks = (torch.arange(like.shape[1], device=like.device) // chunk).expand(like.shape[:2])
    return chunks if documents is None else documents * like.shape[1] + chunks


def attention_shapes(model: nn.Module) -> list[AttentionShape]:
    """The attention layer of every transformer block, in order.

    Reads what the modules say: MPT (``n_heads``, ``head_dim``, ``sliding_window_size``), Hugging Face (``config``,
    ``head_dim``, ``layer_idx``), multi-head latent attention (``qk_head_dim``, ``v_head_dim``).

    Raises:
        ValueError: No blocks, or a block whose attention does not say its heads: an uncounted term would make the
            utilisation too low without saying so.
    """
    blocks = transformer_blocks(model)
    if not blocks:
        raise ValueError("The model has no list of transformer blocks, so its attention cannot be counted.")
    shapes, packed = [], _packed(model)
    for block_name, block in blocks:
        found = list(_outermost_attention(block))
        if not found and not any(r in type(m).__name__.lower() for m in block.modules() for r in RECURRENT):
            raise ValueError(
                f"{clean_name(block_name)}: no attention module found (no class named *Attention*)."
            )
        for name, module in found:
            shapes.append(_shape(clean_name(f"{block_name}.{name}"), module, model, packed))
    return shapes


def _outermost_attention(block: nn.Module) -> list[tuple[str, nn.Module]]:
    taken: list[tuple[str, nn.Module]] = []
    for name, module in named_modules_clean(block):
        inside = any(name.startswith(f"{outer}.") for outer, _ in taken)
        weight = next(module.parameters(), None)
        if name and "attention" in type(module).__name__.lower() and not inside and weight is not None:
            taken.append((name, module))
    return taken


def _shape(name: str, module: nn.Module, model: nn.Module, packed: bool) -> AttentionShape:
    config = getattr(module, "config", None) or getattr(model, "config", None)
    heads = first_int([module, config], "n_heads", "num_heads", "num_attention_heads")
    if heads is None:
        raise ValueError(
            f"{name} ({type(module).__name__}) does not say how many heads it has. "
            "Looked for n_heads, num_heads and num_attention_heads on it and on its config."
        )
    width = first_int([module, config], "hidden_size", "d_model", "embed_dim") or 0
    head_dim = first_int([module, config], "head_dim") or width // heads
    d_qk = first_int([module], "qk_head_dim") or head_dim
    d_v = first_int([module], "v_head_dim") or head_dim
    if not d_qk:
        raise ValueError(f"{name} ({type(module).__name__}) says neither head_dim nor its hidden size.")
    causal = getattr(module, "is_causal", True) is not False
    chunk = first_int([config], "attention_chunk_size") if getattr(module, "use_rope", False) else None
    return AttentionShape(name, heads, d_qk, d_v, _window(module, config), causal, packed, chunk)


def _window(module: nn.Module, config: Any) -> int | None:
    mpt = getattr(module, "sliding_window_size", None)
    if isinstance(mpt, int):  # MPT: that many keys before the query, and the query's own; -1 for none
        return mpt + 1 if mpt >= 0 else None
    if getattr(module, "attention_type", None) == "local":  # GPT-Neo
        return first_int([config], "window_size")
    if hasattr(module, "sliding_window"):  # Gemma, Qwen 3: decided layer by layer
        return first_int([module], "sliding_window") or None
    window = first_int([config], "sliding_window")
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    # Qwen 2: only the layers from max_window_layers on.
    if getattr(config, "use_sliding_window", None) is not None:
        layer = first_int([module], "layer_idx")
        first = first_int([config], "max_window_layers")
        if layer is not None and first is not None and layer < first:
            return None
    return window


def _packed(model: nn.Module) -> bool:
    if any(getattr(module, "attn_uses_sequence_id", False) is True for module in model.modules()):
        return True
    # Flash attention is given the documents; later transformers' masks are made of positions that begin again.
    # Of models alone: a config that LLM Foundry gives to rotary modules raises at names that it does not know.
    models = [m for m in model.modules() if hasattr(type(m), "from_pretrained")]
    kinds = {getattr(getattr(m, "config", None), "_attn_implementation", None) for m in models}
    later = hasattr(sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices")
    return any(kind is not None and (later or "flash" in kind) for kind in kinds)
