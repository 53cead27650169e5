"""A trainer and the server that rolls out with its weights: what to send, and how far the two round apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foundry_fp8.backends.emulated.gemm import scaled_mm
from foundry_fp8.config import ConfigError, check_arguments
from foundry_fp8.export.layout import recipe_run_by, served_linear
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.dtensor import is_dtensor
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.numerics.operands import quantize
from foundry_fp8.numerics.quantize import Quantized, quantize_tensor
from foundry_fp8.numerics.recipes import CurrentScaling, Recipe

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
        what is not in FP8.
    """
    owners = {clean_name(name): module for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        owner, _, leaf = clean_name(name).rpartition(".")
        recipe = recipe_run_by(owners[owner]) if leaf == "weight" else None
        if recipe is None:
            value = parameter.detach()
            yield clean_name(name), (value.full_tensor() if is_dtensor(value) else value).to(dtype), None  # type: ignore[attr-defined]
        else:
            served = served_linear(owner, owners[owner], recipe, dtype)
            yield clean_name(name), served.weight, served.weight_scale


@torch.no_grad()
def rollout_mismatch(
    model: nn.Module, batch: Mapping[str, Any], *, scales: Literal["recipe", "float", "ue8m0"] = "recipe"
) -> float:
    """KL divergence of a server's distribution from training's, the mean over tokens of ``batch``, in nats.

    Training runs as the model is; the server multiplies the weights of :func:`served_weights` by inputs that it quantises itself: with the
    exported scale where there is one, in blocks as the recipe has them, otherwise by token, as vLLM does. Products are emulated.

    Args:
        model: Converted; called with ``batch`` by keywords, its result has ``logits`` ``[..., vocabulary]``. Stays as it is.
        batch: What the model takes.
        scales: Format of the server's scales of inputs: powers of two, float32, or as the recipe's.

    Raises:
        ConfigError: Nothing runs in FP8.
    """
    check_arguments(rollout_mismatch, {"scales": scales}, "rollout_mismatch")
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, FP8Linear) and m.recipe is not None]
    if not layers:
        raise ConfigError("rollout_mismatch: no layer of the model runs in FP8. Convert it (apply_fp8).")
    before = [(m, m.evaluate) for _, m in layers]
    hooks: list[Any] = []
    try:
        for module, _ in before:
            module.evaluate = "fp8"
        with torch.random.fork_rng():
            trained = model(**batch).logits.double().log_softmax(-1)
        hooks = [m.register_forward_hook(_Server(clean_name(n), m, scales)) for n, m in layers]
        with torch.random.fork_rng():
            served = model(**batch).logits.double().log_softmax(-1)
    finally:
        for hook in hooks:
            hook.remove()
        for module, evaluate in before:
            module.evaluate = evaluate
    return float((trained.exp() * (trained - served)).sum(-1).mean())


class _Server:
    """A forward hook that puts a server's result in the place of the layer's own."""

    def __init__(self, name: str, layer: FP8Linear, scales: str) -> None:
        self.name, self.scales = name, scales
        recipe: Any = layer.recipe
        if recipe.kind == "tensor" and not recipe.uses_history:
            recipe = CurrentScaling(granularity="row", power_2_scales=recipe.powers_of_two)
        if scales != "recipe" and hasattr(recipe, "power_2_scales"):
            recipe = dataclasses.replace(recipe, power_2_scales=scales == "ue8m0")
        self.inputs: Recipe = recipe

    def __call__(self, layer: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        dtype = compute_dtype(args[0])
        weight = served_linear(self.name, layer, layer.recipe, dtype)
        x = args[0].to(dtype).reshape(-1, layer.in_features)
        scale = weight.weight_scale.float()
        if weight.input_scale is not None:
            a = quantize_tensor(x, weight.input_scale[0].reciprocal(), self.inputs.format("x"))
        else:
            a = quantize(x, "x", self.inputs)
        block = None if scale.dim() == 1 else layer.recipe.scaling("w", 1).quantize(x[:1], a.fmt).block
        by_row = self.inputs.by_row
        if by_row and scale.dim() == 1:
            scale, block = scale.reshape(1, 1).expand(layer.out_features, 1), (1, layer.in_features)
        scale = scale[0] if scale.dim() == 1 else scale
        b = Quantized(weight.weight, scale, block, a.fmt, torch.zeros_like(scale))
        power_2 = self.inputs.powers_of_two and layer.recipe.powers_of_two
        y = scaled_mm(a, b, out_dtype=dtype, bias=layer.bias, power_2=power_2, by_row=by_row)
        return y.unflatten(0, args[0].shape[:-1]).to(output.dtype)
