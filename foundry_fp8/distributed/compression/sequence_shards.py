"""Tensor parallelism's all-gather of sequence shards before a column-wise FP8 linear, as the very codes that the linear makes of them.

With one scale a tensor, every rank can quantise its shard as the linear quantises the whole: under current scaling once the ranks know the
largest amax (an all-reduce of one number), under delayed scaling at once, since all have the scale. The codes travel with the shard's amax,
and every rank decodes each code to a number **that the linear quantises to that code again**:

- ``code / scale`` in the compute dtype is off by ``u + 3 * 2^-24`` (``u``: 2^-9 bfloat16, 2^-11 float16, 2^-24 float32), and an E4M3 code
  stands for everything within 2^-5 of it, a subnormal one for more. So it is such a number, but where the dtype itself is subnormal and its
  steps are as coarse as E4M3's. There the next number up or down is: the shard's own value is such a number, so the grid has one next to
  ``code / scale``. Which of the three it is, is tried for each of the 256 codes.
- The code of the amax becomes the amax itself. So the linear finds the same amax, and current scaling the same scale; delayed scaling
  records what it would have recorded, saturated values and Inf included. NaN has a code.

So outputs, gradients and state are those of torch's gather, bit for bit. The backward is torch's own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.async_tensor import waited
from foundry_fp8.compat.tensor_parallel_gathers import Gather, all_gather, all_reduce_max, replace_gathers
from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compression.config import KEY
from foundry_fp8.distributed.compression.runtime import Compression, ReportRow
from foundry_fp8.distributed.traffic import Traffic
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.formats import Float8Format, cast
from foundry_fp8.numerics.quantize import amax_of, scale_from_amax
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["attach_sequence_shards", "numbers_of_codes"]

AMAX_BYTES = 4


def attach_sequence_shards(model: nn.Module, compression: Compression) -> None:
    """Gather codes before the FP8 linears of ``model`` whose inputs tensor parallelism prepares.

    Raises:
        ConfigError: There are none.
    """

    def choose(layer: FP8Linear, inputs: tuple[Any, ...]) -> Gather | None:
        return _gather_of(layer, inputs[0], compression.traffic) if inputs else None

    linears = [m for m in model.modules() if isinstance(m, FP8Linear) and replace_gathers(m, choose)]
    if not linears:
        raise ConfigError(
            f"{KEY}.activations: fp8, but no FP8 linear is in a plan of tensor parallelism. Convert (algorithms.fp8) and call "
            "parallelize_module before, or set activations: none."
        )
    why = "where sequence shards are gathered for it and it has one scale a tensor"
    compression.rows += [ReportRow(linear.fqn, "activations", "fp8", why) for linear in linears]


def _gather_of(layer: FP8Linear, x: Tensor, traffic: Traffic) -> Gather | None:
    """What gathers the input of ``layer`` for the forward that begins; ``None`` where it reads more than codes with one scale."""
    recipe = layer.recipe
    codes_alone = layer.runs_fp8 and layer.fprop == layer.wgrad == "fp8" and layer.probe is None
    if not codes_alone or recipe is None or not (recipe.measures_first or recipe.uses_history):
        return None
    scale = None
    if recipe.uses_history:
        assert layer.slots is not None
        layer.slots["x"].state.begin_layer(x.device, trains=layer.training and torch.is_grad_enabled())
        scale = layer.slots["x"].scale
    return functools.partial(_gathered, recipe, scale, traffic)


@torch.no_grad()
def _gathered(
    recipe: Recipe, known: Tensor | None, traffic: Traffic, x: Tensor, ranks: int, group: str
) -> Tensor | None:
    """``[ranks * n, ...]`` of each rank's shard ``x``, ``[n, ...]``: see the module. ``known`` is delayed scaling's scale."""
    dtype, fmt = compute_dtype(x), recipe.format("x")
    if x.numel() == 0 or x.dtype not in (dtype, torch.float32):
        return None
    shard = waited(x).to(dtype).float()
    amax, scale, nbytes = amax_of(shard), known, 0
    if scale is None:
        amax, nbytes = all_reduce_max(amax, group), 2 * AMAX_BYTES * (ranks - 1) // ranks
        scale = scale_from_amax(amax, fmt, power_2=recipe.powers_of_two)
    codes = cast(shard * scale, fmt).view(torch.uint8).flatten()
    message = torch.cat([codes, amax.view(1).view(torch.uint8)])
    arrived = all_gather(message, ranks, group).view(ranks, -1)
    traffic.count("gather of activations", message.nbytes * (ranks - 1) + nbytes)
    traffic.count_logical(x.nbytes * (ranks - 1))
    amax = arrived[:, -AMAX_BYTES:].contiguous().view(torch.float32).amax()
    numbers = numbers_of_codes(scale, amax, fmt, dtype).to(x.dtype)
    whole = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    for part, out in zip(arrived, whole.view(ranks, -1), strict=True):  # one by one: an index has four bytes
        torch.index_select(numbers, 0, part[:-AMAX_BYTES].int(), out=out)
    return whole


def numbers_of_codes(scale: Tensor, amax: Tensor, fmt: Float8Format, dtype: torch.dtype) -> Tensor:
    """For each of the 256 codes a number that ``scale`` quantises to it again: see the module.

    Args:
        scale: 0-d float32.
        amax: 0-d float32, of what was quantised; a number of ``dtype``.
        fmt: The format of the codes.
        dtype: What the linear computes in.

    Returns:
        ``[256]``, ``dtype``. Codes that nothing of ``dtype`` is quantised to have any number.
    """
    codes = torch.arange(256, device=scale.device).to(torch.uint8)
    near = (codes.view(fmt.dtype).float() * scale.reciprocal()).to(dtype)
    bits = near.view(torch.int32 if dtype.itemsize == 4 else torch.int16)
    numbers = near
    for other in ((bits + 1).view(dtype), (bits - 1).view(dtype)):
        again = cast(numbers.float() * scale, fmt).view(torch.uint8)
        numbers = torch.where(again == codes, numbers, other)
    top = cast(amax * scale, fmt).view(torch.uint8)
    amax = amax.to(dtype)
    return torch.where(codes == top, amax, torch.where(codes == top + 128, -amax, numbers))
