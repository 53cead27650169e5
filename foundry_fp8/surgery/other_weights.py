"""The weights that belong to no linear layer and may be multiplied by all the same: raw parameters, convolutions, tied heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.parameter import is_lazy

from foundry_fp8.model_structure.experts import router_modules
from foundry_fp8.surgery.left_out import HEAD, ROUTER, output_heads
from foundry_fp8.surgery.report import SurgeryRow

__all__ = ["other_weights"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NO_PRODUCTS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Layers that only look up or scale by what they hold."""


def other_weights(model: nn.Module, listed: Iterable[nn.Parameter]) -> Iterator[SurgeryRow]:
    """A row for each parameter with two or more dimensions (of more than one element) that is not ``listed``.

    Embeddings and norms have none, except for an embedding that is the output head too.
    """
    heads, routers = set(output_heads(model)), dict(router_modules(model)).values()
    seen = {id(p) for p in listed}
    for name, module in model.named_modules():
        if isinstance(module, NO_PRODUCTS) and module not in heads:
            continue
        for part, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or is_lazy(parameter) or sum(n > 1 for n in parameter.shape) < 2:
                continue
            seen.add(id(parameter))
            if module in heads:
                reason = HEAD
            elif module in routers:
                reason = ROUTER
            elif isinstance(module, CONVOLUTIONS):
                reason = "convolutions stay in high precision"
            else:
                reason = f"{type(module).__name__} holds it as a parameter, not as a linear layer"
            whole = f"{name}.{part}" if name else part
            yield SurgeryRow(name=whole, action="skipped", reason=reason, shape=tuple(parameter.shape))
