"""FSDP2's all-gather of one parameter, as codes: torch's all-gather extension, bound to the plain local shard.

The two methods of the extension are set as attributes on the shard's local tensor. Its type, the parameter, the
optimizer and state dicts stay what they were. Each rank codes its own padded rows, so that no amax travels and uneven
shards (7 rows on 2 ranks) are all alike on the wire.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_fp8.distributed.traffic import Traffic
from foundry_fp8.distributed.wire import WireFormat, decode, encode

__all__ = ["GatheredParameter"]


class GatheredParameter:
    """One ``FSDPParam`` whose all-gather sends codes.

    Args:
        parameter: The ``FSDPParam``.
        wire: What travels.
        traffic: Where the time is counted.
    """

    def __init__(self, parameter: Any, wire: WireFormat, traffic: Traffic) -> None:
        self.parameter = parameter
        self.wire = wire
        self.traffic = traffic
        self.numel = parameter.padded_sharded_param_size.numel()

    def bind(self) -> None:
        """Set the extension on the local shard, unless it is there already."""
        local = self.parameter._sharded_local_tensor
        if hasattr(local, "fsdp_pre_all_gather"):
            return
        local.fsdp_pre_all_gather = self.pre_all_gather
        local.fsdp_post_all_gather = self.post_all_gather
        if not hasattr(self.parameter, "_extensions_data"):
            self.parameter._init_extensions()

    # FSDP2 checks the shape of what a five-argument form returns against the shard's; a message has another shape.
    def pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], None]:
        """This rank's message."""
        shard = self.parameter._sharded_param_data
        with torch.no_grad(), self.traffic.timed("quantize", shard.device):
            message = encode(shard.view(1, -1), self.wire).view(-1)
        return (message,), None

    def post_all_gather(
        self, outputs: tuple[Tensor], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """The whole parameter, padded at its end; written where ``out`` lives if it is given."""
        messages = outputs[0].view(-1, self.wire.row_bytes(self.numel))
        world = messages.shape[0]
        with torch.no_grad(), self.traffic.timed("quantize", messages.device):
            if out is None:
                full = torch.empty(world, self.numel, dtype=param_dtype, device=messages.device)
                decode(messages, self.wire, self.numel, out=full)
                flat = full.view(-1)
                return flat, (flat,)
            # .data: the version counter of the parameter, which autograd has saved, must not move.
            full = torch.as_strided(out.data, (world, self.numel), (self.numel, 1), 0)
            decode(messages, self.wire, self.numel, out=full)
            return None
