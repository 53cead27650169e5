"""DDP: the communication hook."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.distributed import collectives
from foundry_fp8.distributed.background_collectives import CollectiveQueue
from foundry_fp8.distributed.compression.runtime import Compression, Route, Row
from foundry_fp8.distributed.layout import BlockLayout
from foundry_fp8.distributed.traffic import CountingGroup, average
from foundry_fp8.distributed.two_hop import two_hop_all_reduce

__all__ = ["attach_ddp"]

LANES_ON_CPU = 2
"""While one bucket's bytes are on the wire, another is being coded."""


def attach_ddp(ddp: DistributedDataParallel, compression: Compression) -> None:
    """Register the hook. It replaces DDP's all-reduce and its division by the number of ranks."""
    group = ddp.process_group
    route = compression.route(group)
    hook = BucketHook(compression, ddp, route)
    # A function without annotations: DDP compares them with objects, and this file's are strings.
    ddp.register_comm_hook(None, lambda _, bucket: hook.reduce(bucket))
    action = compression.config.gradients if route.compressed else "uncompressed"
    reason = "DDP bucket, all-reduce" if route.compressed else "all ranks are on one node"
    compression.rows.append(Row("DDP buckets", "gradients", action, reason))


class BucketHook:
    """Reduces one bucket after another, in the background.

    Residuals are saved by parameter, not by bucket, because DDP rebuilds its buckets after the first backward.
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
        self.second_leg = config.wire(config.second_leg)
        self.names: dict[int, str] = {}
        self.first_block: dict[str, int] = {}
        count = 0
        for name, parameter in ddp.module.named_parameters():
            self.names[id(parameter)] = name
            self.first_block[name] = count
            count += -(-parameter.numel() // config.block_size)
        lanes = 1 if ddp.device.type == "cuda" or hop is not None else LANES_ON_CPU
        ranks = dist.get_process_group_ranks(ddp.process_group)
        # A lane of its own group: nothing else issues collectives there, so their order is the lane's order.
        self.lanes = [
            CollectiveQueue(
                CountingGroup(dist.new_group(ranks, use_local_synchronization=True), compression.traffic),
                ddp.device,
            )
            for _ in range(lanes)
        ]
        self._layouts: dict[tuple[str, ...], BlockLayout] = {}
        self._packed: dict[tuple[str, ...], Tensor] = {}
        compression.before_save.append(self._write_back)
        compression.after_load.append(self._packed.clear)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start the reduction of ``bucket``; the future holds its buffer, reduced in place."""
        compression = self.compression
        compression.calls += 1
        buffer = bucket.buffer()
        lane = self.lanes[bucket.index() % len(self.lanes)]
        group = lane.group
        taken = self.wire is not None and compression.switch.takes(buffer)
        world = group.size()
        compression.traffic.count_logical(2 * buffer.nbytes * (world - 1) / world, compressed=taken)
        if not taken:
            return lane.submit(lambda: average(buffer, group))
        assert self.wire is not None
        wire, second_leg, hop = self.wire, self.second_leg, self.hop
        layout, residual = self._layout(bucket.parameters())

        def all_reduce(packed: Tensor) -> Tensor:
            options: dict[str, Any] = {
                "second_leg": second_leg,
                "splits": layout.splits,
                "residual": residual,
            }
            if hop is not None:
                return two_hop_all_reduce(packed, hop, wire, **options)
            return collectives.all_reduce(packed, group, wire, **options)

        if residual is None and layout.aligned and hop is None:
            # Blocks are the same without packing, and which rank sums a block leaves no trace in the result.
            return lane.submit(lambda: collectives.all_reduce(buffer, group, wire, second_leg=second_leg))
        return lane.submit(lambda: layout.unpack(all_reduce(layout.pack(buffer)), buffer))

    def _layout(self, parameters: list[Tensor]) -> tuple[BlockLayout, Tensor | None]:
        """The layout of a bucket, and its residual in that layout."""
        names = tuple(self.names[id(parameter)] for parameter in parameters)
        layout = self._layouts.get(names)
        if layout is None:
            self._write_back()  # the buckets changed: back to parameters, and out again
            for stale in [key for key in self._packed if set(key) & set(names)]:
                del self._packed[stale]
            layout = self._layouts[names] = BlockLayout(
                [parameter.numel() for parameter in parameters],
                [self.first_block[name] for name in names],
                self.compression.config.block_size,
                self.lanes[0].group.size(),
                parameters[0].device,
                self.section,
            )
        if self.compression.config.feeds_back and names not in self._packed:
            pieces = [
                self.compression.residual(name, numel, parameters[0].device)
                for name, numel in zip(names, layout.residual_sizes, strict=True)
            ]
            self._packed[names] = layout.pack_residual(pieces)
        return layout, self._packed.get(names)

    def _write_back(self) -> None:
        """Bring the residuals by parameter up to date with those in use."""
        for names, packed in self._packed.items():
            pieces = self._layouts[names].unpack_residual(packed)
            self.compression.residuals.update(zip(names, pieces, strict=True))
