"""DDP: the communication hook, and how it lays a bucket out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.config import refuse
from foundry_fp8.distributed import collectives
from foundry_fp8.distributed.attendance import check_all_to_all
from foundry_fp8.distributed.background_collectives import CollectiveQueue
from foundry_fp8.distributed.compression.legs import LEG_CLASHES, Legs
from foundry_fp8.distributed.compression.runtime import Compression, ReportRow, Route
from foundry_fp8.distributed.mesh import make_group
from foundry_fp8.distributed.rows import Row
from foundry_fp8.distributed.traffic import CountingGroup, average
from foundry_fp8.distributed.two_hop import two_hop_all_reduce

__all__ = ["BlockLayout", "attach_ddp"]

QUEUES_ON_CPU = 2
"""While one bucket's bytes are on the wire, another is being coded."""


def attach_ddp(ddp: DistributedDataParallel, compression: Compression) -> None:
    """Register the hook. It replaces DDP's all-reduce and its division by the number of ranks."""
    refuse(LEG_CLASHES, Legs(config=compression.config, shards=False, replicates=True, ddp=True))
    group = ddp.process_group
    check_all_to_all(group, ddp.device)
    route = compression.route(group, shards=False)
    hook = BucketHook(compression, ddp, route)
    # A function without annotations: DDP compares them with objects, and this file's are strings.
    ddp.register_comm_hook(None, lambda _, bucket: hook.reduce(bucket))
    action = "uncompressed" if route.why_not else compression.config.gradients
    reason = route.why_not or "DDP bucket, all-reduce, vectors and small parameters exactly"
    compression.rows.append(ReportRow("DDP buckets", "gradients", action, reason))


class BucketHook:
    """Reduces one bucket after another, in the background.

    Residuals go from bucket to bucket by parameter when DDP rebuilds its buckets, after the first backward.
    """

    def __init__(self, compression: Compression, ddp: DistributedDataParallel, route: Route) -> None:
        self.compression = compression
        self.hop = hop = route.hop
        self.section = None
        if hop is not None:
            first = hop.inside.rank() * hop.across.size()
            self.section = range(first, first + hop.across.size())
        config = compression.config
        self.wire = route.wire(config.wire(config.gradients))
        self.second_leg = config.second_leg_wire
        self.names: dict[int, str] = {}
        self.first_block: dict[str, int] = {}
        self.exact: dict[str, bool] = {}
        count = 0
        for name, parameter in ddp.module.named_parameters():
            self.names[id(parameter)] = name
            self.first_block[name] = count
            self.exact[name] = config.why_exact(parameter.shape, parameter.element_size()) is not None
            count += -(-parameter.numel() // config.block_size)
        queues = 1 if ddp.device.type == "cuda" or hop is not None else QUEUES_ON_CPU
        ranks = dist.get_process_group_ranks(ddp.process_group)
        # Each has a group of its own: nothing else issues collectives there, so their order is the queue's order.
        self.queues = [
            CollectiveQueue(
                CountingGroup(make_group(ranks, ddp.process_group), compression.traffic), ddp.device
            )
            for _ in range(queues)
        ]
        self._layouts: dict[tuple[str, ...], BlockLayout] = {}
        self._residuals: dict[str, Tensor] = {}
        self._packed: dict[tuple[str, ...], Tensor] = {}
        compression.holders.append(self._held)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start the reduction of ``bucket``; the future holds its buffer, reduced in place."""
        compression = self.compression
        compression.switch.reductions += 1
        buffer = bucket.buffer()
        queue = self.queues[bucket.index() % len(self.queues)]
        group = queue.group
        layout, residual = None, None
        if self.wire is not None and compression.switch.large(buffer):
            layout, residual = self._layout(bucket.parameters())
        coded = layout is not None and any(row.coded for row in layout.rows)
        taken = coded and compression.switch.takes(buffer)
        world = group.size()
        compression.traffic.count_logical(2 * buffer.nbytes * (world - 1) / world)
        if coded and compression.switch.narrows(buffer):
            return queue.submit(lambda: buffer.copy_(average(buffer.bfloat16(), group)))
        if not taken:
            return queue.submit(lambda: average(buffer, group))
        assert self.wire is not None and layout is not None
        wire, second_leg, hop, packing = self.wire, self.second_leg, self.hop, layout

        def all_reduce(packed: Tensor) -> Tensor:
            options: dict[str, Any] = {"second_leg": second_leg, "rows": packing.rows, "residual": residual}
            if hop is not None:
                return two_hop_all_reduce(packed, hop, wire, **options)
            return collectives.all_reduce(packed, group, wire, **options)

        return queue.submit(lambda: packing.unpack(all_reduce(packing.pack(buffer)), buffer))

    def _layout(self, parameters: list[Tensor]) -> tuple[BlockLayout, Tensor | None]:
        """The layout of a bucket, and its residual in that layout."""
        names = tuple(self.names[id(parameter)] for parameter in parameters)
        layout = self._layouts.get(names)
        if layout is None:
            layout = self._layouts[names] = BlockLayout(
                [parameter.numel() for parameter in parameters],
                [self.exact[name] for name in names],
                [self.first_block[name] for name in names],
                self.compression.config.block_size,
                self.queues[0].group.size(),
                parameters[0].device,
                self.section,
            )
        if self.compression.config.uses_error_feedback and names not in self._packed:
            # The buckets changed: back to parameters, and out again.
            for stale in [key for key in self._packed if set(key) & set(names)]:
                pieces = self._layouts[stale].unpack_residual(self._packed.pop(stale))
                self._residuals.update(zip(stale, pieces, strict=True))
            self._packed[names] = layout.pack_residual(
                [
                    self._residuals.pop(
                        name, torch.zeros(numel, dtype=torch.float32, device=parameters[0].device)
                    )
                    for name, numel in zip(names, layout.residual_sizes, strict=True)
                ]
            )
        return layout, self._packed.get(names)

    def _held(self) -> list[Tensor]:
        return [*self._residuals.values(), *self._packed.values()]


class BlockLayout:
    """Packs a bucket (the concatenation of several tensors) into blocks sorted by the owner that sums them.

    DDP reduces its first backward in other buckets than the later ones. If blocks ran across parameters, or if which rank
    sums a block depended on the bucket, the first step after a resume would round differently from the step it repeats.
    Here every parameter starts a block, and block ``k`` of the model is summed by owner ``k mod W``, whatever its bucket.
    Owners are the ranks; under two hops, they are numbered place by place, so that a place of the node has consecutive
    owners and crosses the network with a section of the packed bucket. An owner's coded blocks come before its exact ones.

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
