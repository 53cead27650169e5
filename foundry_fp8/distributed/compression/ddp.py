"""DDP: the communication hook."""

from __future__ import annotations

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
from foundry_fp8.distributed.compression.runtime import Compression, Route
from foundry_fp8.distributed.layout import BlockLayout
from foundry_fp8.distributed.mesh import make_group
from foundry_fp8.distributed.traffic import CountingGroup, average
from foundry_fp8.distributed.two_hop import two_hop_all_reduce

__all__ = ["attach_ddp"]

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
    how = "DDP bucket, all-reduce, vectors and small parameters exactly"
    compression.note("DDP buckets", "gradients", compression.config.gradients, how, route.why_not)


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
