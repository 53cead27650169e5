"""Tensor parallelism's all-gather of sequence shards before a column-wise FP8 linear, as the very codes that the linear makes of them.

With one scale a tensor every rank can quantise its shard as the linear quantises the whole: under current scaling once the ranks know the
largest amax, by an all-reduce of one number, under delayed scaling at once. Each sends its codes and its amax. What arrives is decoded to
numbers that the linear quantises to the same codes, and whose amax is the same (:meth:`~.fsdp2_parameters.TensorCodec.numbers`). So outputs,
gradients and delayed scaling's history are those of torch's own gather, bit for bit. The backward is torch's own.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundry_fp8.compat.async_tensor import waited
from foundry_fp8.compat.tensor_parallel_gathers import Gather, replace_gathers
from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compression.config import KEY
from foundry_fp8.distributed.compression.fsdp2_parameters import TensorCodec
from foundry_fp8.distributed.compression.runtime import Compression, ReportRow
from foundry_fp8.distributed.traffic import CountingGroup, Traffic, reduce_options
from foundry_fp8.kernels.launch import HP_DTYPES
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.formats import E4M3
from foundry_fp8.numerics.quantize import amax_of, scale_from_amax

__all__ = ["NO_SEQUENCE_SHARDS", "attach_sequence_shards"]

NO_SEQUENCE_SHARDS = (
    f"{KEY}.activations: fp8, but no FP8 linear with recipe current or delayed is ColwiseParallel(input_layouts=Shard(...)). Convert, call "
    "parallelize_module with such a plan (what PrepareModuleInput gathers stays as it is), then compress; or set activations: none."
)


def attach_sequence_shards(model: nn.Module, compression: Compression) -> None:
    """Gather codes for the FP8 linears of ``model`` that tensor parallelism gathers sequence shards for, each by itself.

    Raises:
        ConfigError: There are none.
    """
    choose = functools.partial(_gather_of, compression.traffic)
    linears = (module for module in model.modules() if isinstance(module, FP8Linear))
    tensorwise = [linear for linear in linears if "tensor" in (recipe.kind for recipe in linear.recipes)]
    found = [linear.fqn for linear in tensorwise if replace_gathers(linear, choose)]
    if not found:
        raise ConfigError(NO_SEQUENCE_SHARDS)
    compression.rows += [ReportRow(name, "activations", "fp8", "while it has one scale") for name in found]


def _gather_of(traffic: Traffic, layer: FP8Linear, given: Tensor) -> Gather | None:
    """For the forward of ``layer`` that begins; ``None`` where it does not read the codes of a whole tensor alone."""
    recipe, dtype, known = layer.recipe, compute_dtype(given), None
    codes_alone = layer.runs_fp8 and layer.fprop == layer.wgrad == "fp8" and layer.probe is None
    held = dtype in HP_DTYPES and given.dtype in (dtype, torch.float32) and given.numel()
    if recipe is None or recipe.kind != "tensor" or not (codes_alone and held):
        return None
    if recipe.uses_history and layer.slots is not None:
        # Outside of a forward of the whole model the first layer finishes the pass before.
        layer.slots["x"].state.begin_layer(given.device, trains=layer.training and torch.is_grad_enabled())
        known = layer.slots["x"].scale

    @torch.no_grad()
    def gather(x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
        group, world, x = CountingGroup(ranks, traffic), ranks.size(), waited(x)
        amax, scale = amax_of(x.to(dtype)).view(1), known
        if scale is None:
            group.allreduce([amax], reduce_options(dist.ReduceOp.MAX)).wait()
            scale = scale_from_amax(amax[0], E4M3, power_2=recipe.powers_of_two)
        codec = TensorCodec(amax[0], scale, dtype, x.numel() + amax.nbytes)
        message = codec.encode(x.flatten())
        message[x.numel() :] = amax.view(torch.uint8)
        arrived = message.new_empty(world * message.numel())
        group._allgather_base(arrived, message).wait()
        traffic.count_logical(x.nbytes * (world - 1))
        messages, whole = arrived.view(world, -1), x.new_empty(world * x.shape[0], *x.shape[1:])
        amax = messages[:, x.numel() :].contiguous().view(torch.float32).amax()
        dataclasses.replace(codec, amax=amax).decode(messages, whole.view(world, -1))
        return whole

    return gather
