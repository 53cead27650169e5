"""FSDP2's all-gather of an FP8 linear's weight, as the very codes that the linear makes of it.

Under current scaling a weight has one scale, from the amax of all of it. Once the ranks know that amax, each quantises its
shard as the linear would quantise the whole. In what arrives the linear finds the same amax, scale and codes: its outputs and
gradients are those of a gather in high precision, bit for bit, at one byte an element.

    before the model's forward    amax_w = max over ranks of max|shard_w|     one all-reduce for all weights
    gather of w                   codes = cast(shard_w * scale(amax_w))
    after it                      w = numbers that quantise to the same codes, and whose amax is amax_w

Delayed scaling would record the amax of what it is given; block scales (128 x 128, 1 x 32) run across the rows where FSDP2
cuts. Their weights travel in blocks, and so do those of linears that do not run in FP8 now.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from foundry_fp8.distributed.compression.fsdp2_parameters import BlockCodec, GatheredParameter, TensorCodec
from foundry_fp8.distributed.traffic import reduce_options
from foundry_fp8.kernels.launch import HP_DTYPES
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.formats import E4M3
from foundry_fp8.numerics.quantize import amax_of, scale_from_amax
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["share_amaxes"]


def share_amaxes(
    model: nn.Module,
    weights: Sequence[tuple[GatheredParameter, FP8Linear]],
    wire: WireFormat,
    group: dist.ProcessGroup,
) -> None:
    """Before each forward of ``model``, choose what each weight travels as between the ranks of ``group``: codes, or ``wire`` in blocks."""
    blocks = BlockCodec(wire)

    def share(*_: object) -> None:
        chosen = []
        for gathered, linear in weights:
            gathered.codec = blocks
            # Asked for here because the gather of the backward runs outside of autocast.
            kind = gathered.shard.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else gathered.dtype
            recipe = linear.recipe if linear.runs_fp8 else None
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
