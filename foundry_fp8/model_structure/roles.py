"""What a linear of a transformer block is part of: attention, an MLP, an expert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torch import nn

from foundry_fp8.model_structure.blocks import block_index_of, transformer_blocks
from foundry_fp8.model_structure.experts import expert_count, router_modules

__all__ = ["Role", "roles_of"]

Role = Literal["attention", "mlp", "expert", "shared_expert"]

_MLP = ("mlp", "ffn", "feedforward", "feed_forward")
_SHARED = ("shared_expert", "shared_mlp")
"""What experts that see every token are called (Qwen2-MoE, DeepSeek-V3, Llama 4; GraniteMoE)."""
_OTHER_MIXERS = ("mamba", "mixer", "rglru", "recurrent")
"""What stands in attention's place in some blocks, and has no role."""


def roles_of(model: nn.Module, names: Iterable[str]) -> dict[str, Role]:
    """The role of each of ``names``, linears of ``model``; those without one (heads, routers, what is in no block) are left out.

    Looked at are the modules around a linear, below its block: a container of experts makes it an expert's; otherwise the
    innermost that shows a role decides, attention by its class, an MLP by its class or name. What is left in a block is of an
    MLP too: some blocks hold its linears themselves (OPT, BERT).
    """
    blocks = transformer_blocks(model)
    routers = {name for name, _ in router_modules(model)}
    modules = dict(model.named_modules(remove_duplicate=False))

    def role(name: str) -> Role | None:
        index = block_index_of(name, blocks)
        if index is None or name in routers:
            return None
        block = blocks[index][0]
        *parts, leaf = name.removeprefix(f"{block}.").split(".")
        # The second one: the gate of a shared expert.
        if "router" in (*parts, leaf) or leaf.startswith(_SHARED):
            return None
        around = [f"{block}.{'.'.join(parts[: end + 1])}" for end in range(len(parts))]
        if any(part.startswith(_SHARED) for part in parts):
            return "shared_expert"
        if any(expert_count(outer, modules[outer]) for outer in around):
            return "expert"
        for part, outer in zip(reversed(parts), reversed(around), strict=True):
            kind = type(modules[outer]).__name__.lower()
            if part.lower() in _MLP or any(word in kind for word in _MLP):
                return "mlp"
            if "attention" in kind:
                return "attention"
            if any(word in kind for word in _OTHER_MIXERS):
                return None
        return "mlp"

    found = {name: role(name) for name in names}
    return {name: known for name, known in found.items() if known is not None}
