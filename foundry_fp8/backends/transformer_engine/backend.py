"""The Transformer Engine backend: a real ``te.Linear`` computes for each converted linear, which keeps the parameters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_fp8.backends.size_rule import size_reason
from foundry_fp8.backends.transformer_engine.delayed import bind_slots, keep_out_of_global_buffers
from foundry_fp8.backends.transformer_engine.library import ImportProblem, library, load_library
from foundry_fp8.backends.transformer_engine.outputs import keep_non_finite, with_high_precision_wgrad
from foundry_fp8.backends.transformer_engine.recipes import te_recipe_of
from foundry_fp8.backends.transformer_engine.requirements import form_reason, machine_of, requirement
from foundry_fp8.compat.fresh_view import fresh_view
from foundry_fp8.compat.te_fsdp2 import tell_about_fsdp2
from foundry_fp8.layers.attention import AttentionBackend
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.backend import Availability, Backend
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.operands import quantize
from foundry_fp8.numerics.recipes import Operand, Recipe

__all__ = ["TransformerEngineBackend"]

log = logging.getLogger(__name__)

_ATTRIBUTE = "_te_modules"


class TransformerEngineBackend(Backend):
    """Runs FP8 linears through Transformer Engine 2.4 and later.

    The TE modules have no parameters and are no submodules: they hang in the converted linear's ``__dict__``, and see its
    weight and bias during a forward only. So the model's parameters, their names and its ``state_dict`` are those of the
    unconverted model (TE's ``_extra_state`` never appears), FSDP shards what it knows, and deferred initialisation is the
    linear's own.
    """

    name: ClassVar[str] = "transformer_engine"
    lacks: ClassVar[Mapping[str, str]] = {
        **Backend.lacks,
        "cache_weights": "its own cache of quantised weights keeps the scale of the first microbatch under the delayed recipe and "
        "believes its caller about whether a weight changed, so results could differ from uncached ones. Set it to false, or "
        "backend: native",
        "frozen_weights": "its modules read the weight themselves. Set backend: native",
    }

    def availability(self, recipe: Recipe, device: torch.device) -> Availability:
        """Checks the device, the installation, TE's own rules, and the limits that TE does not check."""
        if device.type != "cuda" or torch.version.hip is not None:
            return Availability(
                False,
                "Transformer Engine runs on NVIDIA GPUs alone",
                "Set backend: emulated to check numerics on this device.",
            )
        if not torch.cuda.is_available():
            return Availability(
                False, "torch sees no NVIDIA GPU", "Check the driver, CUDA_VISIBLE_DEVICES and torch's build."
            )
        library = load_library()
        if isinstance(library, ImportProblem):
            return Availability(False, library.reason, library.remedy)
        found = requirement(recipe, machine_of(device, library.version))
        if not found.ok:
            return found
        refusal = library.refusal(recipe.name)
        if refusal is not None:
            return Availability(False, f"Transformer Engine {library.version} refuses: {refusal}")
        return found

    def recipe_reason(self, recipe: Recipe) -> str | None:
        """See :meth:`Backend.recipe_reason`."""
        return form_reason(recipe)

    def shape_reason(self, recipe: Recipe, in_features: int, out_features: int) -> str | None:
        """As everywhere, and whole 128-blocks for block scaling, whose ragged edges TE documents as unsupported.

        With :attr:`BackendOptions.only_where_faster`, why this layer had better not: TE's casts move the bytes that ours do.
        """
        for label, size in (("in_features", in_features), ("out_features", out_features)):
            if size % recipe.block_size:
                return (
                    f"{label}={size} is not a multiple of {recipe.block_size}, which {recipe.name} scaling needs on "
                    "Transformer Engine"
                )
        reason = super().shape_reason(recipe, in_features, out_features)
        if reason is None and self.options.only_where_faster:
            reason = size_reason(recipe, in_features, out_features)
        return reason

    def attention(self) -> AttentionBackend:
        """See :meth:`Backend.attention`."""
        from foundry_fp8.backends.transformer_engine.attention import TransformerEngineAttention

        return TransformerEngineAttention()

    def attach(self, module: FP8Linear) -> None:
        """Make the TE module of the configured recipe, so that what cannot be made fails at conversion."""
        module.__dict__[_ATTRIBUTE] = {}
        assert module.configured_recipe is not None
        te_module_of(module, module.configured_recipe)

    def forward_context(self, recipe: Recipe) -> AbstractContextManager[Any]:
        """One autocast around the model's forward; layers enter their own only where it is not theirs."""
        return library().autocast(te_recipe_of(recipe))

    @torch.compiler.disable
    def linear(self, module: FP8Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`Backend.linear`. Tokens that do not fill the GEMM's tile are padded with zeros, which is exact."""
        dtype = compute_dtype(x)
        recipe = module.recipe
        assert recipe is not None
        if x.numel() == 0:
            return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        if weight.shape != (module.out_features, module.in_features):
            raise RuntimeError(
                f"{module.fqn}: it is {tuple(weight.shape)} here, a part of it: backend: transformer_engine runs no tensor parallelism. Set "
                "backend: native."
            )
        x2d = x.to(dtype).reshape(-1, x.shape[-1])
        tokens = len(x2d)
        missing = -tokens % recipe.token_multiple
        if missing:
            _warn_padding(module.fqn, tokens, recipe.token_multiple)
            x2d = F.pad(x2d, (0, 0, 0, missing))

        weight = weight.contiguous()
        high_precision_wgrad = module.wgrad == "high_precision"
        te_weight = weight.detach() if high_precision_wgrad else weight
        te_module = te_module_of(module, recipe)
        tell_about_fsdp2(te_module, module)
        # The layer's own autocast, unless the model's is the one: a recompute, or a recipe changed at run time.
        te_recipe = te_recipe_of(recipe)
        with nullcontext() if library().is_running(te_recipe) else library().autocast(te_recipe):
            if module.slots is not None and recipe.uses_history:
                record = module.training and torch.is_grad_enabled()
                bind_slots(te_module, module.slots, record=record)
            if module.probe is not None:
                _probe(module, x2d[:tokens].detach(), "x")
                _probe(module, module.matrix.detach(), "w")
            y = _call(te_module, x2d, weight=te_weight, bias=bias)
        if high_precision_wgrad:
            y = with_high_precision_wgrad(y, x2d, weight)
        y = keep_non_finite(y, x2d)
        if missing:
            y = y[:tokens]
        if module.probe is not None and y.requires_grad:
            y.register_hook(functools.partial(_probe, module, operand="dy"))
        return fresh_view(y, *x.shape[:-1], module.out_features)


def te_module_of(module: FP8Linear, recipe: Recipe) -> Any:
    """The parameterless TE module that computes ``module`` under ``recipe``.

    One a recipe: TE keeps the quantisers of the recipe that a module saw first when another of the same class comes
    (TE issue 3157).
    """
    made = module.__dict__[_ATTRIBUTE]
    if recipe not in made:
        options: dict[str, Any] = {
            "bias": module.bias is not None,
            "params_dtype": torch.bfloat16,
            "device": "meta",
        }
        sizes = module.in_features, module.out_features
        te_module = library().te.Linear(*sizes, **options)
        te_module._parameters.clear()
        keep_out_of_global_buffers(te_module, library())
        made[recipe] = te_module
    return made[recipe]


def _call(te_module: Any, x: Tensor, **tensors: Tensor | None) -> Tensor:
    """Run a TE module on ``x`` with ``tensors`` standing for its parameters.

    They are set past ``nn.Module``'s checks, because under FSDP a parameter may be a plain tensor during the forward, and
    removed after it, so that nothing keeps an unsharded weight alive.
    """
    te_module._parameters.update({name: tensor for name, tensor in tensors.items() if tensor is not None})
    try:
        y: Tensor = te_module(x)
        return y
    finally:
        te_module._parameters.clear()


@functools.lru_cache(maxsize=1024)
def _warn_padding(fqn: str, tokens: int, multiple: int) -> None:
    log.warning(
        "%s: %d tokens are padded to a multiple of %d, which costs a copy of its input. "
        "Batch x sequence lengths that are multiples run faster.",
        fqn,
        tokens,
        multiple,
    )


def _probe(module: FP8Linear, tensor: Tensor, operand: Operand) -> None:
    """TE does not hand out what it quantised; the reference gives the same bytes from the same scale."""
    if module.probe is None or module.recipe is None:
        return
    scale = None if module.slots is None else module.slots[operand].scale
    module.probe(operand, tensor, quantize(tensor, operand, module.recipe, along=1, scale=scale))
