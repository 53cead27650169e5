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
        numbers = [
            torch.arange(first, first + size // block_size)
            for first, size in zip(first_blocks, self.padded, strict=True)
        ]
        owner = torch.cat(numbers) % world
        self.order = torch.argsort(owner, stable=True).to(device)
        self.splits = (torch.bincount(owner, minlength=world) * block_size).tolist()

    def pack(self, flat: Tensor) -> Tensor:
        """``flat``: the bucket, any floating dtype; returns its blocks in the ranks' order, float32, padded with zeros."""
        if self.padded != self.sizes:
            aligned = flat.new_zeros(sum(self.padded))
            for part, target in zip(flat.split(self.sizes), aligned.split(self.padded), strict=True):
                target[: part.numel()] = part
            flat = aligned
        return flat.view(-1, self.block_size).index_select(0, self.order).float().view(-1)

    def unpack(self, packed: Tensor, out: Tensor) -> Tensor:
        """The inverse of :meth:`pack`, written into ``out``."""
        aligned = torch.empty_like(packed) if self.padded != self.sizes or out.dtype != packed.dtype else out
        aligned.view(-1, self.block_size).index_copy_(0, self.order, packed.view(-1, self.block_size))
        if self.padded != self.sizes:
            for part, source in zip(out.split(self.sizes), aligned.split(self.padded), strict=True):
                part.copy_(source[: part.numel()])
        elif aligned is not out:
            out.copy_(aligned)
        return out
