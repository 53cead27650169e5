"""FSDP2's all-gather of one parameter, as codes: torch's all-gather extension, bound to the plain local shard.

The two methods of the extension are set as attributes on the shard's local tensor. Its type, the parameter, the
optimizer and state dicts stay what they were. Each rank codes its own padded rows, so that no amax travels and uneven
shards (7 rows on 2 ranks) are all alike on the wire.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.compat.fsdp2 import ShardedParameter
from foundry_fp8.distributed.traffic import Traffic
from foundry_fp8.distributed.wire import decode, encode
from foundry_fp8.numerics.formats import E4M3, cast
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["BlockCodec", "GatheredParameter", "TensorCodec"]


CHUNKS = 8  # of a decode, so that its temporaries stay small beside the weight


class BlockCodec:
    """One float32 scale a block of the shard; see :mod:`foundry_fp8.distributed.wire`."""

    def __init__(self, wire: WireFormat) -> None:
        self.wire = wire

    def encode(self, shard: Tensor) -> Tensor:
        """The message of the padded ``shard``: uint8 ``[bytes]``, of a size that depends on the shard's alone."""
        return encode(shard.view(1, -1), self.wire).view(-1)

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """Write the shards of all ranks, ``[W, n]``, from their messages, ``[W, bytes]``."""
        decode(messages, self.wire, out.shape[1], out=out)


@dataclasses.dataclass(frozen=True)
class TensorCodec:
    """E4M3 with one scale for the whole of a tensor; see :class:`BlockCodec`.

    Attributes:
        amax: Of the whole tensor in ``dtype``, float32, 0-d; decoding needs it.
        scale: What the linear's own scale will be.
        dtype: What the linear computes in.
        message_bytes: Of the codes and what follows them. With block scales for weights: FSDP2 keeps the buffers of the first gather.
    """

    amax: Tensor
    scale: Tensor
    dtype: torch.dtype
    message_bytes: int

    def encode(self, shard: Tensor) -> Tensor:
        """See :meth:`BlockCodec.encode`."""
        codes = cast(shard.to(self.dtype).float() * self.scale, E4M3).view(torch.uint8)
        return torch.nn.functional.pad(codes, (0, self.message_bytes - codes.numel()))

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """See :meth:`BlockCodec.decode`."""
        values = self.numbers()
        rows = -(-out.shape[0] // CHUNKS)
        for part, target in zip(messages.split(rows), out.split(rows), strict=True):
            target.copy_(values[part[:, : out.shape[1]].int()])

    def numbers(self) -> Tensor:
        """``[256]``: for each code a number of ``dtype`` that the scale quantises to that code again; any number for codes that none has.

        ``code / scale`` is off by at most ``u + 3 * 2^-24`` of it (``u``: 2^-9 in bfloat16, 2^-11 in float16), and a code takes what is
        within 2^-5 of it, a subnormal one more. It suffices but where ``dtype`` is subnormal and its steps are as coarse as the codes';
        there the number above or below does, since what was quantised is such a number and no further away. The code of the amax
        becomes the amax itself, Inf too, whose scale is the same.
        """
        codes = torch.arange(256, device=self.scale.device).to(torch.uint8)
        numbers = (codes.view(E4M3.dtype).float() * self.scale.reciprocal()).to(self.dtype)
        bits = numbers.view(torch.int32 if self.dtype.itemsize == 4 else torch.int16)
        for beside in ((bits + 1).view(self.dtype), (bits - 1).view(self.dtype)):
            again = cast(numbers.float() * self.scale, E4M3).view(torch.uint8)
            numbers = torch.where(again == codes, numbers, beside)
        largest = cast(self.amax * self.scale, E4M3).view(torch.uint8)
        signed = torch.where(codes < 128, self.amax, -self.amax).to(self.dtype)
        return torch.where(codes & 127 == largest, signed, numbers)


class GatheredParameter:
    """One parameter whose all-gather sends codes.

    Attributes:
        codec: May be replaced between gathers, on all ranks alike.
    """

    def __init__(
        self, parameter: ShardedParameter, codec: BlockCodec | TensorCodec, traffic: Traffic
    ) -> None:
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
    def pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], BlockCodec | TensorCodec]:
        """This rank's message, and who can read it."""
        with torch.no_grad(), self.traffic.timed("quantize", self.shard.device):
            return (self.codec.encode(self.shard),), self.codec

    def post_all_gather(
        self,
        outputs: tuple[Tensor],
        codec: BlockCodec | TensorCodec,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
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
