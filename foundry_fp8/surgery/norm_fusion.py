"""Which norms are computed in the kernels of the linears that read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import nn

from foundry_fp8.layers.deferred_norm import defer, qualified_name, refusal
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.wrappers import replace_module

__all__ = ["SITES", "Fusion", "fuse_norms", "plan_norms"]

_BLOCKS = "llmfoundry.models.layers.blocks"
SITES: dict[str, tuple[tuple[str, str], ...]] = {
    f"{_BLOCKS}.MPTBlock": (
        ("norm_1", "attn.Wqkv"),
        ("norm_2", "ffn.up_proj"),
        ("norm_attn_norm.norm_1", "norm_attn_norm.attn.Wqkv"),
        ("norm_attn_norm.norm_2", "ffn.up_proj"),
    ),
}
"""Block class -> (norm, the one linear that reads its output). A test holds it against the real blocks."""


@dataclasses.dataclass(frozen=True)
class Fusion:
    """What became of a norm that a linear reads: computed in the linear's kernel, or not."""

    norm: str
    refused: str | None = None
    """Why it was left alone; ``None`` if it is fused."""


def plan_norms(model: nn.Module, converted: Mapping[str, FP8Linear]) -> dict[str, Fusion]:
    """Which norms of ``model`` feed exactly one converted linear and can be fused with it.

    Returns:
        By the linear's name: what it is to be fused with, or why it cannot be.
    """
    return {
        linear: Fusion(norm, refusal(model.get_submodule(norm), converted[linear]))
        for norm, linear in _sites(model)
        if linear in converted
    }


def fuse_norms(model: nn.Module, converted: Mapping[str, FP8Linear], plan: Mapping[str, Fusion]) -> None:
    """Carry out :func:`plan_norms`, in place. Parameters keep their identity and names."""
    for name, fusion in plan.items():
        if fusion.refused is None:
            norm = model.get_submodule(fusion.norm)
            replace_module(model, fusion.norm, defer(norm, converted[name]))


def _sites(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, block in list(model.named_modules()):
        for norm, linear in SITES.get(qualified_name(type(block)), ()):
            if linear == "ffn.up_proj" and hasattr(block.ffn, "gate_proj"):
                continue  # a gated unit reads the norm twice
            try:
                block.get_submodule(norm), block.get_submodule(linear)
            except AttributeError:
                continue
            prefix = f"{name}." if name else ""
            yield prefix + norm, prefix + linear
