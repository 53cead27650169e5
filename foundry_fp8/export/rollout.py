"""A trainer and the server that rolls out with its weights: what to send, and how far the two round apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foundry_fp8.backends.emulated.gemm import scaled_mm
from foundry_fp8.compat.checkpoint_form import checkpoint_form
from foundry_fp8.config import ConfigError, check_arguments
from foundry_fp8.export.layout import fused_amaxes, recipe_run_by, served_weight, stored
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.frozen_weight import gathered, in_high_precision
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.numerics.nvfp4 import BLOCK
from foundry_fp8.numerics.operands import quantize
from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.numerics.recipes import CurrentScaling

__all__ = ["rollout_mismatch", "served_weights"]


def served_weights(
    model: nn.Module, *, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Every parameter as a server multiplies by it, one at a time: names as in a checkpoint, the numbers of :func:`export_fp8`.

    Args:
        model: Converted, whole or sharded by FSDP2; then every rank iterates, and each parameter in turn is gathered.
        dtype: What the forward computes in.

    Yields:
        ``(name, codes, scales)``: float8_e4m3fn and what to multiply with, ``[1]``, ``[out, 1]`` or one a block; ``(name, value, None)`` for
        what is not in FP8, and for each tensor that stores an NVFP4 weight.
    """
    owners = {clean_name(name): module for name, module in model.named_modules()}
    amaxes = fused_amaxes(owners)
    for name, held in model.named_parameters():
        key, parameter = clean_name(name), gathered(held.detach())
        layer = owners.get(key, owners.get(key.removesuffix(".weight")))
        if (recipe := recipe_run_by(layer, parameter)) is None:
            plain = in_high_precision(parameter, dtype)
            yield from ((n, value, None) for n, value in checkpoint_form(model, {key: plain}).items())
        else:
            amax = amaxes.get(key.removesuffix(".weight"))
            for n, served in stored(model, key, layer, parameter, recipe, dtype, amax=amax):
                if served.global_scale is None:
                    yield n, served.weight, served.weight_scale
                else:
                    found = served.tensors("compressed-tensors").items()
                    yield from ((n.removesuffix("weight") + leaf, tensor, None) for leaf, tensor in found)


@torch.no_grad()
def rollout_mismatch(
    model: nn.Module, batch: Mapping[str, Any], *, scales: Literal["recipe", "float", "ue8m0"] = "recipe"
) -> float:
    """KL divergence of a server's distribution from training's, the mean over tokens of ``batch``, in nats.

    Training runs as the model is; the server multiplies the weights of :func:`served_weights` by inputs that it quantises itself: with the
    exported scale where there is one, in blocks as the recipe has them, otherwise by token, as vLLM does; with ``nvfp4`` they stay in high
    precision. Products are emulated.

    Args:
        model: Converted; called with ``batch`` by keywords, its result has ``logits`` ``[..., vocabulary]``. Stays as it is.
        batch: What the model takes.
        scales: Format of the server's scales of inputs: powers of two, float32, or as the recipe's.

    Raises:
        ConfigError: Nothing runs in FP8.
    """
    check_arguments(rollout_mismatch, {"scales": scales}, "rollout_mismatch")
    layers = {
        clean_name(n): m
        for n, m in model.named_modules()
        if isinstance(m, FP8Linear) and recipe_run_by(m, m.weight)
    }
    amaxes = fused_amaxes(layers)
    if not layers:
        raise ConfigError("rollout_mismatch: no layer of the model runs in FP8. Convert it (apply_fp8).")

    def distribution() -> Tensor:
        with torch.random.fork_rng():
            found: Tensor = model(**batch).logits.double().log_softmax(-1)
        return found

    with ExitStack() as stack:
        for layer in layers.values():
            stack.callback(setattr, layer, "evaluate", layer.evaluate)
            layer.evaluate = "fp8"
        trained = distribution()
        for name, layer in layers.items():
            hook = _server(name, layer.recipe, scales, amaxes.get(name))
            stack.callback(layer.register_forward_hook(hook).remove)
        served = distribution()
    return float((trained.exp() * (trained - served)).sum(-1).mean())


def _server(name: str, recipe: Any, scales: str, amax: Tensor | None) -> Callable[..., Tensor]:
    """A forward hook that puts a server's result in the place of the layer's own."""
    inputs, block = recipe, getattr(recipe.scaling("w", 1), "block", None)
    if recipe.measures_first:
        inputs = CurrentScaling(granularity="row", power_2_scales=recipe.powers_of_two)
    if scales != "recipe" and hasattr(inputs, "power_2_scales"):
        inputs = dataclasses.replace(inputs, power_2_scales=scales == "ue8m0")

    def run(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        dtype = compute_dtype(args[0])
        served = served_weight(name, layer, layer.weight, recipe, dtype, amax=amax)
        if served.global_scale is not None:
            grid = served.weight_scale.float() * served.global_scale.reciprocal()
            plain = served.weight.float() * grid.repeat_interleave(BLOCK, 1)
            bias = None if layer.bias is None else layer.bias.float()
            return nn.functional.linear(args[0].to(dtype).float(), plain, bias).to(dtype)
        known = None if served.input_scale is None else served.input_scale[0].reciprocal()
        a = quantize(args[0].to(dtype).flatten(0, -2), "x", inputs, scale=known)
        scale = served.weight_scale.float()
        scale = (
            scale.expand(len(served.weight), 1) if inputs.by_row else scale[0] if scale.dim() == 1 else scale
        )
        b = Quantized(served.weight, scale, block, a.fmt, torch.zeros_like(scale))
        exact = inputs.powers_of_two and recipe.powers_of_two
        y = scaled_mm(a, b, out_dtype=dtype, bias=layer.bias, power_2=exact, by_row=inputs.by_row)
        return y.unflatten(0, args[0].shape[:-1])

    return run
