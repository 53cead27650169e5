"""What a measurement leaves as it was: forwards and backwards of their own, and a training run that never knows of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from foundry_fp8.distributed.compression.apply import compression_of
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.delayed_scaling import states_of
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from foundry_fp8.layers.ledger import GemmLedger
from foundry_fp8.model_structure.names import named_modules_clean
from foundry_fp8.model_structure.unchanged import random_state

__all__ = ["FP8Layer", "fp8_layers", "unchanged_state"]

FP8Layer = FP8GemmLayer | FP8DotProductAttention
_OF_A_LAYER = ("recipe", "ledger", "probe", "passes", "_first_forward_recorded")
"""The attributes of an FP8 layer that a pass reads or writes."""


def fp8_layers(model: nn.Module) -> dict[str, FP8Layer]:
    """The converted linears and attentions of ``model`` by clean name."""
    return {name: m for name, m in named_modules_clean(model) if isinstance(m, FP8Layer)}


@contextlib.contextmanager
def unchanged_state(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Run forwards and backwards of ``model`` inside that leave no trace in its training.

    Put back afterwards: gradients, buffers, the default random generators, the recipes, ledgers and operand hooks of FP8 layers, and
    delayed scaling's scales, histories and passes. Compressed communication sends plain gradients and counts nothing; compiled models
    run eagerly, and their graphs stay. Delayed scaling finishes its pass first (a collective), as the next training forward would.

    A layer that does not run the recipe that it was converted with has the amaxes of the last pass here as its whole history: training
    records none, and older ones may be of the outliers for which it was demoted.

    Args:
        model: Not wrapped by DDP, whose module is called directly; by FSDP or by nothing.

    Yields:
        A function that puts everything back; call it before each further pass, so that all begin alike.

    Raises:
        RuntimeError: FSDP1 holds gradients.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    if fsdp1 and any(gradient is not None for gradient in gradients):
        raise RuntimeError(
            "FSDP1 holds gradients, which a measurement cannot set aside: call it after optimizer.zero_grad(), before the first backward"
        )
    layers = fp8_layers(model)
    own = {name: {k: v for k, v in vars(layer).items() if k in _OF_A_LAYER} for name, layer in layers.items()}
    demoted = [layer for layer in layers.values() if layer.recipe != layer.configured_recipe]
    idle = [slot for layer in demoted for slot in (layer.slots or {}).values()]
    states = states_of(model)
    for state in states:
        state.update()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    device = next((p.device for p in parameters), torch.device("cpu"))
    restore = [random_state(device), *(state.saved() for state in states)]

    @torch.no_grad()
    def rewind() -> None:
        amaxes = [slot.amax.clone() for slot in idle]
        for put_back in restore:
            put_back()
        for slot, amax in zip(idle, amaxes, strict=True):
            slot.amax_history.zero_()
            slot.record(amax)
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
        for parameter in parameters:
            parameter.grad = None

    for layer in layers.values():
        layer.ledger, layer.probe = GemmLedger(), None
    for state in states:
        state.measuring = True
    compression = compression_of(model)
    try:
        with (
            compression.suspended() if compression else contextlib.nullcontext(),
            torch.compiler.set_stance("force_eager"),
        ):
            rewind()
            yield rewind
    finally:
        rewind()
        for state in states:
            state.measuring = False
        for name, layer in layers.items():
            vars(layer).update(own[name])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
