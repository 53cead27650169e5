"""Worker: native FP8 attention, with a stand-in for cuDNN, under FSDP2 and full checkpointing."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from foundry_fp8.numerics.recipes import DelayedScaling
from foundry_fp8.surgery.attention import FP8AttentionState
from tests.backends.native.cudnn_stand_in import SMALL_HEADS, stand_in
from tests.kernels import interpreter
from tests.surgery.conversion import convert_attention
from tests.surgery.test_attention import Plain

STEPS = 3


def interpret(patch):
    """Casts interpreted, cuDNN stood in for."""
    interpreter.interpret(patch)
    stand_in(patch, SMALL_HEADS)


def batch(step, rows):
    """Rows of four; each with a range of its own, so that ranks measure different amaxes."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 16, 32, generator=generator) * torch.tensor([0.5, 1.0, 1.5, 3.0])[:, None, None]
    return x[rows]


def trained(model, rows):
    """Gradients of every step, and the scales at the end."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        model(batch(step, rows)).square().sum().backward()
        for parameter in model.parameters():
            gradient = parameter.grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found.append(gradient.clone())
    state = FP8AttentionState.of(model)
    state.update()
    return found, state.delayed.scale.clone()


def make():
    torch.manual_seed(0)
    model = Plain().train()
    convert_attention(model, recipe=DelayedScaling(amax_history_len=2), backend="native")
    return model


def alone():
    """Both ranks' rows in one process."""
    return trained(make(), slice(0, 4))


def of_an_average():
    """What FSDP2 gets where it asks for the mean of the ranks' gradients, of ones: 1, or 2 where gloo adds up instead.

    torch 2.7: reduce_scatter_tensor(AVG) is the sum there (pytorch issue 162338), so that FSDP2's gradients are as many times as large as there are ranks.
    """
    mean = torch.empty(1)
    dist.reduce_scatter_tensor(mean, torch.ones(dist.get_world_size()), op=dist.ReduceOp.AVG)
    return float(mean)


def sharded():
    """One of two ranks, and :func:`of_an_average`."""
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = make()
        model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        return *trained(model, slice(2 * rank, 2 * rank + 2)), of_an_average()
