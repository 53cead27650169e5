"""FSDP2's all-gather of one parameter, as codes: torch's all-gather extension, bound to the plain local shard.

The two methods of the extension are set as attributes on the shard's local tensor. Its type, the parameter, the
optimizer and state dicts stay what they were. Each rank codes its own padded rows, so that no amax travels and uneven
shards (7 rows on 2 ranks) are all alike on the wire.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from foundry_fp8.compat.fsdp2 import ShardedParameter
from foundry_fp8.distributed.traffic import Traffic
from foundry_fp8.distributed.wire import decode, encode
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["BlockCodec", "Codec", "GatheredParameter"]


class Codec(Protocol):
    """What a shard travels as."""

    def encode(self, shard: Tensor) -> Tensor:
        """The message of the padded ``shard``: uint8 ``[bytes]``, of a size that depends on the shard's alone."""

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Write the shards of all ranks, ``[W, n]``, from their messages, ``[W, bytes]``."""


class BlockCodec:
    """One float32 scale a block of the shard; see :mod:`foundry_fp8.distributed.wire`."""

    def __init__(self, wire: WireFormat) -> None:
        self.wire = wire

    def encode(self, shard: Tensor) -> Tensor:
        """See :class:`Codec`."""
        return encode(shard.view(1, -1), self.wire).view(-1)

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """See :class:`Codec`."""
        decode(messages, self.wire, out.shape[1], out=out)


class GatheredParameter:
    """One parameter whose all-gather sends codes.

    Attributes:
        codec: May be replaced between gathers, on all ranks alike.
    """

    def __init__(self, parameter: ShardedParameter, codec: Codec, traffic: Traffic) -> None:
        self.parameter = parameter
        self.codec = codec
        self.traffic = traffic
        self.numel = parameter.padded_numel

    @property
    def dtype(self) -> torch.dtype:
        """What the parameter is gathered in."""
        return self.parameter.gathered_dtype

    @property
    def shard(self) -> Tensor:
        """This rank's rows, flat, padded with zeros to those of rank 0."""
        return self.parameter.shard

    def bind(self) -> None:
        """Set the extension on the local shard, unless it is there already."""
        self.parameter.extend(self.pre_all_gather, self.post_all_gather)

    # FSDP2 checks the shape of what a five-argument form returns against the shard's; a message has another shape.
    def pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], Codec]:
        """This rank's message, and who can read it."""
        with torch.no_grad(), self.traffic.timed("quantize", self.shard.device):
            return (self.codec.encode(self.shard),), self.codec

    def post_all_gather(
        self, outputs: tuple[Tensor], codec: Codec, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """The whole parameter, padded at its end; written where ``out`` lives if it is given."""
        world = self.parameter.ranks
        messages = outputs[0].view(world, -1)
        with torch.no_grad(), self.traffic.timed("quantize", messages.device):
            if out is None:
                full = torch.empty(world, self.numel, dtype=param_dtype, device=messages.device)
                codec.decode(messages, full)
                flat = full.view(-1)
                return flat, (flat,)
            # .data: the version counter of the parameter, which autograd has saved, must not move.
            codec.decode(messages, torch.as_strided(out.data, (world, self.numel), (self.numel, 1), 0))
            return None
