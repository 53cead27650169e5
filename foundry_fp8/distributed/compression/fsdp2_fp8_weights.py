"""FSDP2's all-gather of an FP8 linear's weight, as the very codes that the linear makes of it.

Under current scaling a weight has one scale, from the amax of all of it. Once the ranks know that amax, each quantises its
shard as the linear would quantise the whole. In what arrives the linear finds the same amax, and so the same scale and the
same codes: its outputs and gradients are those of a gather in high precision, bit for bit, at one byte an element (and the
space of block scales, unused).

    before the model's forward    amax_w = max over ranks of max|shard_w|     one all-reduce for all weights
    gather of w                   codes = cast(shard_w * scale(amax_w))
    after it                      w = numbers_of_codes(scale(amax_w), amax_w)

Delayed scaling would record the amax of what it is given; block scales (128 x 128, 1 x 32) run across the rows where FSDP2
cuts. Their weights travel in blocks, and so do those of linears that do not run in FP8 now.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundry_fp8.distributed.compression.fsdp2_parameters import BlockCodec, GatheredParameter
from foundry_fp8.distributed.traffic import reduce_options
from foundry_fp8.kernels.launch import HP_DTYPES
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.formats import E4M3, cast
from foundry_fp8.numerics.quantize import amax_of, numbers_of_codes, scale_from_amax
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["TensorCodec", "share_amaxes"]

CHUNKS = 8  # of a decode, so that its temporaries stay small beside the weight


@dataclasses.dataclass(frozen=True)
class TensorCodec:
    """E4M3 with one scale for the whole of a tensor; a :class:`~.fsdp2_parameters.Codec`.

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
        """See :class:`~.fsdp2_parameters.Codec`."""
        codes = cast(shard.to(self.dtype).float() * self.scale, E4M3).view(torch.uint8)
        return torch.nn.functional.pad(codes, (0, self.message_bytes - codes.numel()))

    def decode(self, messages: Tensor, out: Tensor) -> None:
        """See :class:`~.fsdp2_parameters.Codec`."""
        values = numbers_of_codes(self.scale, self.amax, E4M3, self.dtype)
        rows = -(-out.shape[0] // CHUNKS)
        for part, target in zip(messages.split(rows), out.split(rows), strict=True):
            target.copy_(values[part[:, : out.shape[1]].int()])


def share_amaxes(
    model: nn.Module,
    weights: Sequence[tuple[GatheredParameter, FP8Linear]],
    wire: WireFormat,
    group: dist.ProcessGroup,
) -> None:
    """Before each forward of ``model``, choose what each weight travels as until the next.

    ``group`` are the ranks that share each of them, ``wire`` is what they travel as in blocks.
    """
    blocks = BlockCodec(wire)

    def share(*_: object) -> None:
        chosen = []
        for gathered, linear in weights:
            gathered.codec = blocks
            dtype, recipe = _compute_dtype(gathered), linear.recipe if linear.runs_fp8 else None
            if recipe is not None and recipe.measures_first and dtype in HP_DTYPES:
                chosen.append((gathered, recipe.powers_of_two, dtype))
        if not chosen:
            return
        with torch.no_grad():
            amaxes = torch.stack([amax_of(gathered.shard.to(dtype)) for gathered, _, dtype in chosen])
            group.allreduce([amaxes], reduce_options(dist.ReduceOp.MAX)).wait()
        for (gathered, power_2, dtype), amax in zip(chosen, amaxes, strict=True):
            scale = scale_from_amax(amax, E4M3, power_2=power_2)
            gathered.codec = TensorCodec(amax, scale, dtype, wire.row_bytes(gathered.numel))

    model.register_forward_pre_hook(share, prepend=True)


def _compute_dtype(gathered: GatheredParameter) -> torch.dtype:
    """What the linear casts its weight to: asked for here because the gather of the backward runs outside of autocast."""
    device_type = gathered.shard.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return gathered.dtype
