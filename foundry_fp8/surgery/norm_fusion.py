"""Which norms are computed in the kernels of the linears that read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import nn

from foundry_fp8.layers.deferred_norm import defer, qualified_name, refusal
from foundry_fp8.layers.linear import FP8Linear

__all__ = ["SITES", "Fusion", "fuse_norms"]

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


def fuse_norms(model: nn.Module, converted: Mapping[str, FP8Linear]) -> dict[str, Fusion]:
    """Fuse every norm of ``model`` that feeds exactly one converted linear, in place.

    Parameters keep their identity and names.

    Returns:
        By the linear's name: what it was fused with, or why it was not.
    """
    outcome: dict[str, Fusion] = {}
    for norm_name, linear_name in _sites(model):
        linear = converted.get(linear_name)
        if linear is None:
            continue
        norm = model.get_submodule(norm_name)
        refused = refusal(norm, linear)
        outcome[linear_name] = Fusion(norm_name, refused)
        if refused is None:
            parent, _, child = norm_name.rpartition(".")
            setattr(model.get_submodule(parent), child, defer(norm, linear))
    return outcome


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
