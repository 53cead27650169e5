"""What a measurement leaves as it was: forwards and backwards of their own, and a training run that never knows of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from foundry_fp8.distributed.compression.apply import compression_of
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.delayed_scaling import DelayedScalingState, DelayedSlot
from foundry_fp8.layers.ledger import GemmLedger
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.model_structure.names import named_modules_clean
from foundry_fp8.surgery.attention import FP8AttentionState

__all__ = ["FP8Layer", "fp8_layers", "unchanged_state"]

FP8Layer = FP8Linear | FP8DotProductAttention

_OF_A_LAYER = ("recipe", "ledger", "probe", "_first_forward_recorded")
"""The attributes of an FP8 layer that a pass reads or writes."""


def fp8_layers(model: nn.Module) -> dict[str, FP8Layer]:
    """The converted linears and attentions of ``model`` by clean name."""
    return {name: m for name, m in named_modules_clean(model) if isinstance(m, FP8Layer)}


@contextlib.contextmanager
def unchanged_state(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Run forwards and backwards of ``model`` inside that leave no trace in its training.

    Put back afterwards: gradients, buffers, the random numbers of the default generators (CPU and the model's GPU) and of every
    :class:`torch.Generator` that is an attribute of a module, the recipes, ledgers and operand hooks of FP8 layers, and delayed
    scaling's scales, histories and passes. Compressed communication sends plain gradients and counts nothing; compiled models run eagerly,
    and their graphs stay. Delayed scaling finishes its pass at the beginning (a collective), as the next training forward would.

    A layer that does not run the recipe that it was converted with keeps the amaxes that a pass here records: it has no others,
    and its history would be out of date when it returns.

    Args:
        model: Not wrapped by DDP, whose module is called directly; by FSDP or by nothing.

    Yields:
        A function that puts everything back; call it before each further pass, so that all begin alike.

    Raises:
        RuntimeError: FSDP1 holds gradients: call it before the first backward of a step, after ``zero_grad()``.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    _refuse_fsdp1_gradients(model, gradients)
    layers = fp8_layers(model)
    own = {name: {key: vars(layer).get(key) for key in _OF_A_LAYER} for name, layer in layers.items()}
    idle = [
        slot
        for layer in layers.values()
        if layer.recipe != layer.configured_recipe
        for slot in (layer.slots or {}).values()
    ]
    states = _delayed_states(model)
    for state in states:
        state.update()
    restore = [_random_numbers(model), _buffers(model), *(state.saved() for state in states)]

    def rewind() -> None:
        amaxes = [slot.amax.clone() for slot in idle]
        for put_back in restore:
            put_back()
        _record(idle, amaxes)
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
            vars(layer).update({key: value for key, value in own[name].items() if key in vars(layer)})
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _refuse_fsdp1_gradients(model: nn.Module, gradients: list[Tensor | None]) -> None:
    if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()) and any(
        gradient is not None for gradient in gradients
    ):
        raise RuntimeError(
            "FSDP1 keeps gradients in memory of its own, which a measurement cannot set aside. Call it before the first "
            "backward of a step, after optimizer.zero_grad()."
        )


def _delayed_states(model: nn.Module) -> list[DelayedScalingState]:
    found = [FP8State.of(model), FP8AttentionState.of(model)]
    return [state.delayed for state in found if state is not None and state.delayed is not None]


def _record(slots: list[DelayedSlot], amaxes: list[Tensor]) -> None:
    with torch.no_grad():
        for slot, amax in zip(slots, amaxes, strict=True):
            slot.record(amax)


def _random_numbers(model: nn.Module) -> Callable[[], None]:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    generators = [(generator, generator.get_state()) for generator in _generators(model)]

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        for generator, state in generators:
            generator.set_state(state)

    return restore


def _generators(model: nn.Module) -> Iterator[torch.Generator]:
    """Those that are attributes of a module, by themselves or in a list."""
    for module in model.modules():
        for value in vars(module).values():
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, torch.Generator):
                    yield item


def _buffers(model: nn.Module) -> Callable[[], None]:
    kept: list[tuple[Any, Tensor]] = [(buffer, buffer.clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def restore() -> None:
        for buffer, value in kept:
            if not torch.equal(buffer, value):
                buffer.copy_(value)

    return restore
