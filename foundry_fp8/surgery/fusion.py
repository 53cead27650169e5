"""Which norms and MLPs of a model are computed in the kernels of its converted linears (``algorithms.fp8.fuse``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.blocks import transformer_blocks
from foundry_fp8.model_structure.forms import MLPForm, NormForm, mlp_form, norm_form
from foundry_fp8.model_structure.fused_classes import fuse

__all__ = ["FusionPlan", "plan_fusion"]


@dataclasses.dataclass(frozen=True)
class FusionPlan:
    """By name, what each norm and MLP computes that is to be fused, and why others are not."""

    norms: Mapping[str, NormForm] = dataclasses.field(default_factory=dict)
    mlps: Mapping[str, MLPForm] = dataclasses.field(default_factory=dict)
    left: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def carry_out(self, model: nn.Module) -> None:
        """Give them their forwards. Parameters, names and hooks stay."""
        from foundry_fp8.backends.native.fused import mlp_forward, norm_forward

        for name, norm in self.norms.items():
            fuse(model.get_submodule(name), norm_forward, norm)
        for name, mlp in self.mlps.items():
            fuse(model.get_submodule(name), mlp_forward, mlp)


def plan_fusion(model: nn.Module, converted: Mapping[str, FP8Linear]) -> FusionPlan:
    """The norms of blocks whose converted linears (by name) read as many features, and the MLPs whose linears are converted."""
    norms, mlps, left = {}, {}, {}
    known: dict[object, Any] = {}

    def once(find: Callable[..., Any], module: nn.Module, *more: Any) -> Any:
        key = find, *_what_it_is(module), *map(str, more)
        if key not in known:
            known[key] = find(module, *more)
        return known[key]

    for block_name, block in transformer_blocks(model) or [("", model)]:
        prefix = f"{block_name}." if block_name else ""
        read = {m.in_features for n, m in converted.items() if n.startswith(prefix)}
        for part, module in block.named_modules(prefix=block_name):
            weight = module._parameters.get("weight")
            names = {f"{part}.{n}" if part else n: n for n in module._modules}
            linears = {n: converted[name] for name, n in names.items() if name in converted}
            if weight is not None and weight.dim() == 1 and weight.numel() in read:
                if (norm := once(norm_form, module)) is not None:
                    norms[part] = norm
                else:
                    left[part] = f"{type(module).__name__} computes what no norm in the kernels does"
            elif len(linears) > 1:
                features = {n: (m.in_features, m.out_features) for n, m in linears.items()}
                if (mlp := once(mlp_form, module, features)) is not None:
                    mlps[part] = mlp
    return FusionPlan(norms, mlps, left)


def _what_it_is(module: nn.Module) -> tuple[object, ...]:
    """Equal for modules that compute the same function of their parameters, as far as their attributes tell."""
    own = {name: value for name, value in vars(module).items() if name != "training"}
    plain = sorted((name, value) for name, value in own.items() if isinstance(value, int | float | str))
    children = [(n, type(m), str(m)) for n, m in module._modules.items()]
    parts = [(n, None if p is None else tuple(p.shape)) for n, p in module._parameters.items()]
    return type(module), str(plain), str(children), str(parts), "forward" in vars(module)
