"""Mixtures of experts, recognised by what they are: a container of experts, and beside it a router with one output an expert."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["expert_count", "router_modules"]

_COUNTS = ("num_experts", "moe_num_experts", "num_local_experts", "n_routed_experts")
"""What containers call the number of their experts (Llama 4, Granite, JetMoe, DBRX, LLM Foundry)."""
_ROUTERS = ("gate", "router", "gating", "wg")
"""Last parts of the names that routers go by where their experts are in a list of another name."""


def expert_count(name: str, module: nn.Module) -> int | None:
    """How many experts ``module``, which its owner knows as ``name``, holds; ``None`` if it is no container of experts."""
    if "expert" not in f"{name.rpartition('.')[2]} {type(module).__name__}".lower():
        return None
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return len(module)
    counts = (getattr(module, attribute, None) for attribute in _COUNTS)
    return next((count for count in counts if isinstance(count, int)), None)


def router_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The leaf modules that choose between experts, as ``(name, module)``.

    A router sits beside a container of experts, itself or as the only layer of a module that does (``gate``,
    ``router.layer``, ``router.classifier``), and its weight has as many rows as there are experts. So the ``gate`` of a
    gated unit is none.
    """
    for name, owner in model.named_modules():
        children = dict(owner.named_children())
        counts = {expert_count(part, child) for part, child in children.items()} - {None}
        lists = {len(c) for c in children.values() if isinstance(c, nn.ModuleList | nn.ModuleDict)}
        for part, child in children.items():
            if expert_count(part, child):
                continue
            prefix = f"{name}.{part}" if name else part
            leaves = [(prefix, child), *((f"{prefix}.{n}", m) for n, m in child.named_children())]
            leaves = [(n, m) for n, m in leaves if _rows(m) is not None]
            if len(leaves) == 1:  # an expert, shared by all tokens, has several
                inner, leaf = leaves[0]
                if _rows(leaf) in counts or (part in _ROUTERS and _rows(leaf) in lists):
                    yield inner, leaf


def _rows(module: nn.Module) -> int | None:
    weight = module._parameters.get("weight")
    if weight is None or is_lazy(weight) or weight.dim() != 2:
        return None
    return weight.shape[0]
