"""DDP: the communication hook."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.algorithms.compressed_communication.runtime import Compression, Row
from foundry_fp8.distributed import collectives
from foundry_fp8.distributed.lanes import Lane
from foundry_fp8.distributed.traffic import CountingGroup, average
from foundry_fp8.distributed.two_hop import TwoHop, hop_numel, two_hop_all_reduce

__all__ = ["attach_ddp"]

LANES_ON_CPU = 2
"""While one bucket's bytes are on the wire, another is being coded."""


def attach_ddp(ddp: DistributedDataParallel, compression: Compression) -> None:
    """Register the hook. It replaces DDP's all-reduce and its division by the number of ranks."""
    group = ddp.process_group
    compression.replicate_group = group
    hop = compression.hop_for(group, compress_inside=True)
    config = compression.config
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    hook = BucketHook(compression, group, names, ddp.device, hop or None)
    # A function without annotations: DDP compares them with objects, and this file's are strings.
    ddp.register_comm_hook(None, lambda _, bucket: hook.reduce(bucket))
    action = config.gradients if hop is not False else "uncompressed"
    reason = "DDP bucket, all-reduce" if hop is not False else "all ranks are on one node"
    compression.rows.append(Row("DDP buckets", "gradients", action, reason))


class BucketHook:
    """Reduces one bucket after another, in the background.

    Residuals are kept by parameter, not by bucket, because DDP rebuilds its buckets after the first backward.
    """

    def __init__(
        self,
        compression: Compression,
        group: dist.ProcessGroup,
        names: dict[int, str],
        device: torch.device,
        hop: TwoHop | None,
    ) -> None:
        self.compression = compression
        self.names = names
        self.hop = hop
        config = compression.config
        self.wire = config.wire(config.gradients)
        self.second_leg = config.wire(config.second_leg)
        lanes = 1 if device.type == "cuda" or hop is not None else LANES_ON_CPU
        ranks = dist.get_process_group_ranks(group)
        # A lane of its own group: nothing else issues collectives there, so their order is the lane's order.
        self.lanes = [
            Lane(CountingGroup(dist.new_group(ranks, use_local_synchronization=True), compression.traffic), device)
            for _ in range(lanes)
        ]
        self._joined: dict[tuple[str, ...], Tensor] = {}

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
        residual = self._residual(bucket) if compression.config.feeds_back else None
        if hop is not None:
            return lane.submit(
                lambda: two_hop_all_reduce(buffer, hop, wire, second_leg=second_leg, residual=residual)
            )
        return lane.submit(
            lambda: collectives.all_reduce(buffer, group, wire, second_leg=second_leg, residual=residual)
        )

    def _residual(self, bucket: dist.GradBucket) -> Tensor:
        """The residual of the bucket, flat, whose pieces are the residuals of its parameters."""
        parameters = bucket.parameters()
        key = tuple(self.names[id(parameter)] for parameter in parameters)
        if self.hop is not None:
            size = hop_numel(bucket.buffer().numel(), self.hop.inside.size())
            return self.compression.residual("+".join(key), size, bucket.buffer().device)
        flat = self._joined.get(key)
        if flat is None:
            pieces = [
                self.compression.residual(name, parameter.numel(), parameter.device)
                for name, parameter in zip(key, parameters, strict=True)
            ]
            flat = torch.cat(pieces)
            for stale in [other for other in self._joined if set(other) & set(key)]:
                del self._joined[stale]
            self._joined[key] = flat
            parts = flat.split([piece.numel() for piece in pieces])
            self.compression.residuals.update(zip(key, parts, strict=True))
        return flat
