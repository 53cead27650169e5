"""A process group that compresses what passes through it: the seam for FSDP2, whose torch 2.7 has no setter.

FSDP2 calls ``reduce_scatter_tensor`` and ``all_reduce`` on the groups of its mesh. Putting this group there compresses
both legs of FSDP2 and native HSDP, unit by unit, without a global patch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_fp8.distributed import collectives
from foundry_fp8.distributed.traffic import CountingGroup, FinishedWork, Traffic, reduction_of
from foundry_fp8.distributed.two_hop import TwoHop, reduce_scatter_two_hop, two_hop_all_reduce
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["CompressedGroup", "Switch"]


@dataclasses.dataclass
class Switch:
    """What may change while training: shared by everything that compresses in one model."""

    on: bool = True
    """Off during warm-up: everything travels uncompressed."""
    min_bytes: int = 0
    """Tensors with fewer bytes than this travel uncompressed."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is compressed now. Depends on nothing that differs between ranks."""
        return self.on and tensor.is_floating_point() and tensor.nbytes >= max(self.min_bytes, 1)


class CompressedGroup(CountingGroup):
    """Compresses the reduce-scatters and all-reduces of one FSDP2 unit; passes everything else on, counted.

    Args:
        inner: The group of the mesh.
        traffic: Where bytes are counted.
        switch: When to compress.
        wire: The first shot; ``None`` compresses nothing (bytes are still counted, and gloo still averages).
        second_leg: The second shot of an all-reduce.
        hop: Two-hop groups where ``inner`` spans nodes and only the network is worth compressing.
        residual: Error feedback of the all-reduce.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        traffic: Traffic,
        switch: Switch,
        wire: WireFormat | None,
        *,
        second_leg: WireFormat | None = None,
        hop: TwoHop | None = None,
        residual: Tensor | None = None,
    ) -> None:
        super().__init__(inner, traffic)
        self.switch = switch
        self.wire = wire
        self.second_leg = second_leg
        self.hop = hop
        self.residual = residual

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        taken = self.wire is not None and self.switch.takes(input)
        self.traffic.count_logical(input.nbytes - input.nbytes // self.size(), compressed=taken)
        if not taken:
            return super()._reduce_scatter_base(output, input, opts)
        assert self.wire is not None
        mean = reduction_of(opts, "reduce-scatter")
        with torch.no_grad():
            if self.hop is not None:
                part = reduce_scatter_two_hop(input, self.hop, self.wire, mean=mean)
            else:
                part = collectives.reduce_scatter(input.view(-1), self, self.wire, mean=mean)
            output.copy_(part.view_as(output))
        return FinishedWork([output])

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """All-reduce, in place; compressed if it is one floating tensor that is large enough."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = dist.AllreduceOptions() if opts is None else opts
        nbytes = sum(t.nbytes for t in tensors)
        taken = self.wire is not None and len(tensors) == 1 and self.switch.takes(tensors[0])
        # Not "in (SUM, AVG)": a RedOpType does not know that it equals a ReduceOp.
        taken = taken and (opts.reduceOp == dist.ReduceOp.SUM or opts.reduceOp == dist.ReduceOp.AVG)
        self.traffic.count_logical(2 * (nbytes - nbytes // self.size()), compressed=taken)
        if not taken:
            return super().allreduce(tensors, opts)
        assert self.wire is not None
        options: dict[str, Any] = {
            "second_leg": self.second_leg,
            "mean": reduction_of(opts, "all-reduce"),
            "residual": self.residual,
        }
        with torch.no_grad():
            flat = tensors[0].view(-1)
            if self.hop is not None:
                two_hop_all_reduce(flat, self.hop, self.wire, **options)
            else:
                collectives.all_reduce(flat, self, self.wire, **options)
        return FinishedWork(tensors)
