"""A process group that compresses what passes through it: the seam for FSDP2, whose torch 2.7 has no setter.

FSDP2 calls ``reduce_scatter_tensor`` and ``all_reduce`` on the groups of its mesh. Putting this group there compresses
both legs of FSDP2 and native HSDP, unit by unit, without a global patch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_fp8.distributed import collectives
from foundry_fp8.distributed.rows import Row
from foundry_fp8.distributed.traffic import CountingGroup, FinishedWork, Traffic, reduction_of
from foundry_fp8.distributed.two_hop import TwoHop, own_numel, reduce_scatter_two_hop, two_hop_all_reduce
from foundry_fp8.distributed.wire import Noise
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["WAYS", "CompressedGroup", "Leg", "Switch", "Way"]

Way = Literal["coded", "bf16", "plain"]
WAYS: tuple[Way, ...] = ("coded", "bf16", "plain")
"""How gradients that may be compressed travel, by how much is rounded: as configured, in bfloat16, in their own dtype."""


@dataclasses.dataclass
class Switch:
    """What may change while training: shared by everything that compresses in one model."""

    on: bool = True
    """Off during warm-up: everything travels uncompressed."""
    way: Way = "coded"
    """How they travel while this is on."""
    min_bytes: int = 0
    """Tensors with fewer bytes than this travel uncompressed."""
    reductions: int = 0
    """Reductions of gradients that ran, compressed or not."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is compressed now. Depends on nothing that differs between ranks."""
        return self.on and self.way == "coded" and self.large(tensor)

    def narrows(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` travels in bfloat16 now."""
        return self.on and self.way == "bf16" and self.large(tensor) and tensor.element_size() > 2

    def large(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is compressed once the warm-up is over."""
        return tensor.is_floating_point() and tensor.nbytes >= max(self.min_bytes, 1)


@dataclasses.dataclass
class Leg:
    """How one leg of one FSDP unit is compressed: its reduce-scatter, or its all-reduce across replicas."""

    wire: WireFormat
    """The first shot."""
    rows: Callable[[int], Sequence[Row] | None]
    """What each rank sums of a tensor of so many elements; ``None`` where that is not known, and so not compressed."""
    second_leg: WireFormat | None = None
    """The second shot of an all-reduce; ``wire`` where ``None``."""
    hop: TwoHop | None = None
    """Two-hop groups where the group spans nodes and only the network is worth compressing."""
    noise: Noise | None = None
    """Round a reduce-scatter at random."""
    uses_error_feedback: bool = False
    """Whether an all-reduce carries what it lost to the next."""
    _residual: Tensor | None = None

    def residual(self, numel: int, device: torch.device) -> Tensor | None:
        """The error feedback of an all-reduce of ``numel`` elements; fresh where their number changed."""
        rows = self.rows(numel) if self.uses_error_feedback else None
        if rows is None:
            return None
        kept = numel if self.hop is None else own_numel(rows, self.hop)
        if self._residual is None or self._residual.numel() != kept:
            self._residual = torch.zeros(kept, dtype=torch.float32, device=device)
        return self._residual

    def held(self) -> list[Tensor]:
        """The residual in use, if there is one."""
        return [] if self._residual is None else [self._residual]


class CompressedGroup(CountingGroup):
    """Compresses the reduce-scatters or all-reduces of one FSDP unit; passes everything else on, counted.

    Without a ``leg`` nothing is compressed; bytes are still counted, and gloo still averages.
    """

    def __init__(
        self, inner: dist.ProcessGroup, traffic: Traffic, switch: Switch, leg: Leg | None = None
    ) -> None:
        super().__init__(inner, traffic)
        self.switch = switch
        self.leg = leg

    def _rows(self, tensor: Tensor) -> Sequence[Row] | None:
        """What each rank sums of ``tensor`` if it is compressed, else ``None``."""
        rows = self.leg.rows(tensor.numel()) if self.leg is not None and self.switch.takes(tensor) else None
        return rows if rows is not None and any(row.coded for row in rows) else None

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        self.switch.reductions += 1
        rows, leg = self._rows(input), self.leg
        self.traffic.count_logical(input.nbytes - input.nbytes // self.size())
        if leg is not None and self.switch.narrows(input):
            part = torch.empty_like(output, dtype=torch.bfloat16)
            super()._reduce_scatter_base(part, input.bfloat16(), opts).wait()
            output.copy_(part)
            return FinishedWork([output])
        if rows is None or leg is None:
            return super()._reduce_scatter_base(output, input, opts)
        options: dict[str, Any] = {
            "rows": rows,
            "mean": reduction_of(opts, "reduce-scatter"),
            "noise": leg.noise,
        }
        with torch.no_grad():
            if leg.hop is not None:
                part = reduce_scatter_two_hop(input, leg.hop, leg.wire, **options)
            else:
                part = collectives.reduce_scatter(input.view(-1), self, leg.wire, **options)
            output.copy_(part.view_as(output))
        return FinishedWork([output])

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """All-reduce, in place; compressed if it is one floating tensor that is large enough."""
        self.switch.reductions += 1
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = dist.AllreduceOptions() if opts is None else opts
        nbytes = sum(t.nbytes for t in tensors)
        # Not "in (SUM, AVG)": a RedOpType does not know that it equals a ReduceOp.
        sums = opts.reduceOp == dist.ReduceOp.SUM or opts.reduceOp == dist.ReduceOp.AVG
        rows, leg = self._rows(tensors[0]) if sums and len(tensors) == 1 else None, self.leg
        self.traffic.count_logical(2 * (nbytes - nbytes // self.size()))
        if leg is not None and sums and len(tensors) == 1 and self.switch.narrows(tensors[0]):
            narrow = tensors[0].bfloat16()
            super().allreduce([narrow], opts).wait()
            tensors[0].copy_(narrow)
            return FinishedWork(tensors)
        if rows is None or leg is None:
            return super().allreduce(tensors, opts)
        options: dict[str, Any] = {
            "rows": rows,
            "second_leg": leg.second_leg,
            "mean": reduction_of(opts, "all-reduce"),
            "residual": leg.residual(tensors[0].numel(), tensors[0].device),
        }
        with torch.no_grad():
            flat = tensors[0].view(-1)
            if leg.hop is not None:
                two_hop_all_reduce(flat, leg.hop, leg.wire, **options)
            else:
                collectives.all_reduce(flat, self, leg.wire, **options)
        return FinishedWork(tensors)
