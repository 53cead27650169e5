"""A layout of several tensors in blocks that does not depend on what they are reduced together with.

DDP reduces its first backward in other buckets than the later ones. If blocks ran across parameters, or if which rank
sums a block depended on the bucket, the first step after a resume would round differently from the step it repeats.
Here every parameter starts a block, and block ``k`` of the model is summed by owner ``k mod W``, whatever its bucket.
Owners are the ranks; under two hops, they are numbered place by place, so that a place of the node has consecutive
owners and crosses the network with a section of the packed bucket. An owner's coded blocks come before its exact ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foundry_fp8.distributed.rows import Row

__all__ = ["BlockLayout"]


class BlockLayout:
    """Packs a bucket (the concatenation of several tensors) into blocks sorted by the owner that sums them.

    Residuals are kept by tensor, as whole blocks (so that what int4's rotation leaves in the padding is kept too), of the
    section only.

    Args:
        sizes: Elements of each tensor of the bucket, in its order.
        exact: Whether each of them travels exactly.
        first_blocks: The number, in the whole model, of each tensor's first block.
        block_size: Elements in a block.
        world: Ranks, each of which owns a section.
        device: Where the bucket lives.
        section: The owners whose blocks this rank quantises, and keeps a residual of; all where ``None``.

    Attributes:
        aligned: Whether every tensor is whole blocks, so that blocks are the same without packing.
        rows: What each owner sums.
        residual_sizes: Elements of each tensor's residual.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        exact: Sequence[bool],
        first_blocks: Sequence[int],
        block_size: int,
        world: int,
        device: torch.device,
        section: range | None = None,
    ) -> None:
        self.sizes = list(sizes)
        self.block_size = block_size
        self.padded = [size + -size % block_size for size in self.sizes]
        self.aligned = self.padded == self.sizes
        numbers = [
            torch.arange(first, first + size // block_size, device="cpu")
            for first, size in zip(first_blocks, self.padded, strict=True)
        ]
        owner = torch.cat(numbers) % world
        blocks = [n // block_size for n in self.padded]
        kind = owner * 2 + torch.tensor(exact, dtype=torch.int64, device="cpu").repeat_interleave(
            torch.tensor(blocks, dtype=torch.int64, device="cpu")
        )
        order = torch.argsort(kind, stable=True)
        self.order = order.to(device)
        self.inverse = torch.argsort(self.order)
        counts = (torch.bincount(kind, minlength=2 * world) * block_size).view(world, 2).tolist()
        self.rows = [Row.join([(coded, False), (exactly, True)], block_size) for coded, exactly in counts]

        section = range(world) if section is None else section
        mine = (owner >= section.start) & (owner < section.stop)
        self.residual_sizes = [int(part.sum()) * block_size for part in mine.split(blocks)]
        # Where the blocks of the section, in the bucket's order, lie in the section.
        self._section_inverse = torch.argsort(order[mine[order]]).to(device)

    def pack(self, flat: Tensor) -> Tensor:
        """``flat``: the bucket, any floating dtype; returns its blocks in the owners' order, float32, padded with zeros."""
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

    def pack_residual(self, pieces: Sequence[Tensor]) -> Tensor:
        """``pieces``: the residual of each tensor, float32 ``[residual_sizes[i]]``; returns that of the packed section."""
        blocks = torch.cat(list(pieces)).view(-1, self.block_size)
        packed = torch.empty_like(blocks)
        packed[self._section_inverse] = blocks
        return packed.view(-1)

    def unpack_residual(self, packed: Tensor) -> tuple[Tensor, ...]:
        """The inverse of :meth:`pack_residual`."""
        blocks = packed.view(-1, self.block_size).index_select(0, self._section_inverse)
        return blocks.view(-1).split(self.residual_sizes)
