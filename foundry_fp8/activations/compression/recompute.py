"""What fused forms keep for backward, and how hooks ask them to make their output again instead of keeping that too.

A fused form is a custom autograd function whose node carries ``recompute``, a function from the node to the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.activations.compression.packing import pack, packable, unpack
from foundry_fp8.layers.autocast import autocast_now
from foundry_fp8.numerics.packed import Packed, PackFormat

__all__ = [
    "MaybePacked", "fuses", "pack_if", "recomputation", "repeatable", "save_inputs", "saved_inputs", "unpacked",
]  # fmt: skip

MaybePacked = Packed | Tensor

_RESHAPES_AND_CASTS = frozenset(
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "ReshapeAlias", "ToCopy", "Alias", "Detach", "Unsqueeze", "Squeeze")
)


def recomputation(x: Tensor, *, exact: bool = False) -> Callable[[], Tensor] | None:
    """How backward can make ``x`` again from what a fused form keeps, if ``x`` is its output, reshaped or cast.

    With ``exact``, only bit for bit: not from what is kept packed.
    """
    node = x.grad_fn
    while node is not None and node.name() in _RESHAPES_AND_CASTS:
        node = node.next_functions[0][0]
    recompute = getattr(node, "recompute", None)
    if recompute is None or node.numel != x.numel() or not x.is_contiguous():  # type: ignore[union-attr]
        return None
    if exact and any(layout is not None for layout in node.layout):  # type: ignore[union-attr]
        return None
    dtype, shape = x.dtype, x.shape
    return lambda: recompute(node).to(dtype).view(shape)


def repeatable(expression: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """``expression`` without gradients, whenever it is called under the autocast of now."""
    autocast = autocast_now(device)

    def repeat(*args: Tensor) -> Tensor:
        with torch.no_grad(), autocast():
            return expression(*args)

    return repeat


def fuses(x: Tensor, other: Tensor | None = None) -> bool:
    """Whether a fused form takes these inputs; without gradients and for other dtypes the plain expression runs."""
    if not torch.is_grad_enabled() or not packable(x):
        return False
    return other is None or (packable(other) and other.dtype == x.dtype and other.shape == x.shape)


def pack_if(x: Tensor, fmt: PackFormat | None) -> MaybePacked:
    """``x`` packed, or ``x``."""
    return x if fmt is None else pack(x, fmt)


def unpacked(kept: MaybePacked, shape: torch.Size) -> Tensor:
    """The values, not to be written to."""
    return unpack(kept).view(shape) if isinstance(kept, Packed) else kept.reshape(shape)


def save_inputs(ctx: Any, kept: list[MaybePacked], *others: Tensor | None) -> None:
    """Save for backward, where :func:`saved_inputs` finds it."""
    tensors: list[Tensor | None] = []
    ctx.layout = []
    for k in kept:
        tensors += (k.codes, k.scale_inv) if isinstance(k, Packed) else (k,)
        ctx.layout.append((k.fmt, k.numel, k.dtype) if isinstance(k, Packed) else None)
    ctx.save_for_backward(*tensors, *others)


def saved_inputs(ctx: Any) -> tuple[list[MaybePacked], list[Tensor | None]]:
    """What :func:`save_inputs` was given, out of the graph: modules run on it again, and hooks on them may ask for a node, of which
    a view that is made without gradients has none (``FlopCounterMode``'s do).
    """
    tensors: list[Any] = [None if x is None else x.detach() for x in ctx.saved_tensors]
    kept: list[MaybePacked] = []
    for layout in ctx.layout:
        kept.append(tensors.pop(0) if layout is None else Packed(tensors.pop(0), tensors.pop(0), *layout))
    return kept, tensors
