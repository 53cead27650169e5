"""A layout of several tensors in blocks that does not depend on what they are reduced together with.

DDP reduces its first backward in other buckets than the later ones. If blocks ran across parameters, or if which rank
sums a block depended on the bucket, the first step after a resume would round differently from the step it repeats.
Here every parameter starts a block, and block ``k`` of the model is summed by rank ``k mod W``, whatever its bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["BlockLayout"]


class BlockLayout:
    """Packs a bucket (the concatenation of several tensors) into blocks sorted by the rank that sums them.

    Args:
        sizes: Elements of each tensor of the bucket, in its order.
        first_blocks: The number, in the whole model, of each tensor's first block.
        block_size: Elements in a block.
        world: Ranks.
        device: Where the bucket lives.

    Attributes:
        aligned: Whether every tensor is whole blocks, so that blocks are the same without packing.
        splits: Elements that each rank sums.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        first_blocks: Sequence[int],
        block_size: int,
        world: int,
        device: torch.device,
    ) -> None:
        self.sizes = list(sizes)
        self.block_size = block_size
        self.padded = [size + -size % block_size for size in self.sizes]
        self.aligned = self.padded == self.sizes
        numbers = [
            torch.arange(first, first + size // block_size)
            for first, size in zip(first_blocks, self.padded, strict=True)
        ]
        owner = torch.cat(numbers) % world
        self.order = torch.argsort(owner, stable=True).to(device)
        self.inverse = torch.argsort(self.order)
        self.splits = (torch.bincount(owner, minlength=world) * block_size).tolist()

    def pack(self, flat: Tensor) -> Tensor:
        """``flat``: the bucket, any floating dtype; returns its blocks in the ranks' order, float32, padded with zeros."""
        if not self.aligned:
            aligned = flat.new_zeros(sum(self.padded))
            for part, target in zip(flat.split(self.sizes), aligned.split(self.padded), strict=True):
                target[: part.numel()] = part
            flat = aligned
        return flat.view(-1, self.block_size).index_select(0, self.order).float().view(-1)

    def unpack(self, packed: Tensor, out: Tensor) -> Tensor:
        """The inverse of :meth:`pack`, written into ``out``."""
        aligned = torch.empty_like(packed) if not self.aligned or out.dtype != packed.dtype else out
        blocks = packed.view(-1, self.block_size)
        torch.index_select(blocks, 0, self.inverse, out=aligned.view(-1, self.block_size))
        if not self.aligned:
            for part, source in zip(out.split(self.sizes), aligned.split(self.padded), strict=True):
                part.copy_(source[: part.numel()])
        elif aligned is not out:
            out.copy_(aligned)
        return out
