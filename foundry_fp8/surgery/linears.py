"""Which linears of a model become FP8, swapped how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.backend import Backend
from foundry_fp8.layers.dtensor import is_dtensor
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.blocks import block_index_of, transformer_blocks, transformer_stacks
from foundry_fp8.model_structure.selection import check_patterns_match, matches
from foundry_fp8.numerics.recipes import Recipe
from foundry_fp8.surgery.report import SurgeryRow

__all__ = ["convert_linears", "kept_blocks"]

ROUTER_NAMES = ("gate", "router", "gating", "wg")
"""Last parts of the names that mixture-of-experts routers go by (Mixtral, Qwen-MoE, DBRX, Megablocks)."""


def convert_linears(
    model: nn.Module,
    *,
    recipe: Recipe,
    backend: Backend,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    keep_first_blocks: int = 0,
    keep_last_blocks: int = 0,
    wgrad: Literal["fp8", "high_precision"] = "fp8",
    evaluate: Literal["fp8", "high_precision"] = "high_precision",
    key: str = "algorithms.fp8",
) -> tuple[tuple[SurgeryRow, ...], dict[str, FP8Linear]]:
    """Replace the chosen ``nn.Linear`` modules of ``model`` by :class:`FP8Linear`, in place.

    Parameters keep their identity, name, device (``meta`` included) and ties. A module that appears under several names
    is converted once. Embeddings are not linears; output heads and mixture-of-experts routers are always left out.

    Args:
        model: Any module.
        recipe: What the converted modules run.
        backend: Who runs them; it also says which shapes it cannot take.
        include: Globs on the module names to consider.
        exclude: Globs on the module names to leave out.
        keep_first_blocks: Transformer blocks left alone at the bottom of each stack.
        keep_last_blocks: Transformer blocks left alone at the top of each stack.
        wgrad: Whether the weight gradient's GEMM runs in FP8.
        evaluate: What ``eval()`` mode runs in.
        key: The YAML key, for messages.

    Returns:
        A row a linear, and the converted modules by (first) name.

    Raises:
        ConfigError: A pattern that matches nothing, too many blocks kept, or nothing left to convert.
    """
    linears = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)]
    names = [name for name, _ in linears]
    if include != ("*",):
        check_patterns_match(include, names, f"{key}.include", "linear layers")
    check_patterns_match(exclude, names, f"{key}.exclude", "linear layers")
    kept = kept_blocks(model, keep_first_blocks, keep_last_blocks, key)
    blocks = transformer_blocks(model)
    outside = _structurally_excluded(model)

    rows: list[SurgeryRow] = []
    converted: dict[str, FP8Linear] = {}
    replaced: dict[nn.Module, FP8Linear] = {}
    for name, linear in linears:
        reason = outside.get(linear) or _name_reason(name) or _module_reason(linear)
        if reason is None and not matches(name, include):
            reason = f"{key}.include does not name it"
        if reason is None and matches(name, exclude):
            reason = f"{key}.exclude names it"
        if reason is None and block_index_of(name, blocks) in kept:
            reason = "it is in a block that keep_first_blocks or keep_last_blocks leaves in high precision"
        if reason is None:
            reason = backend.shape_reason(recipe, linear)
        size: dict[str, Any] = {"in_features": linear.in_features, "out_features": linear.out_features}
        if reason is not None:
            rows.append(SurgeryRow(name=name, action="skipped", reason=reason, **size))
            continue
        if linear not in replaced:
            replaced[linear] = converted[name] = FP8Linear.from_linear(
                linear, fqn=name, backend=backend, recipe=recipe, wgrad=wgrad, evaluate=evaluate
            )
        _set_module(model, name, replaced[linear])
        rows.append(SurgeryRow(name=name, action="converted", reason=recipe.name, **size))

    if not converted:
        reasons = Counter(row.reason for row in rows)
        said = "; ".join(f"{count} because {reason}" for reason, count in reasons.most_common(5))
        raise ConfigError(
            f"{key}: no linear layer was converted ({said or 'the model has none'}). "
            f"Check {key}.include and {key}.exclude, or remove the algorithm."
        )
    return tuple(rows), converted


def kept_blocks(model: nn.Module, first: int, last: int, key: str) -> set[int]:
    """Indices of the transformer blocks that stay in high precision, of every stack the outermost.

    Raises:
        ConfigError: They are all blocks of all stacks.
    """
    if not first and not last:
        return set()
    kept: set[int] = set()
    count = 0
    for stack in transformer_stacks(model):
        inside = range(count, count + len(stack))
        kept |= {*inside[:first], *inside[max(0, len(stack) - last) :]}
        count += len(stack)
    if len(kept) == count:
        raise ConfigError(
            f"{key}.keep_first_blocks={first} and {key}.keep_last_blocks={last} leave nothing of the model's {count} "
            "transformer blocks to convert. Lower them, or name the layers with exclude."
        )
    return kept


def _structurally_excluded(model: nn.Module) -> dict[nn.Module, str]:
    """Linears that must stay in high precision, or whose forward is never called, whatever their name."""
    found: dict[nn.Module, str] = {}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            found[module.out_proj] = "nn.MultiheadAttention reads its weight without calling it"
        if isinstance(module, nn.Linear) and id(module.weight) in embeddings:
            found[module] = "its weight is tied to an embedding"
        head = _output_head(module)
        if head is not None:
            found[head] = "output heads stay in high precision"
    return found


def _output_head(module: nn.Module) -> nn.Module | None:
    """The output head of a Hugging Face model, by its own accessor."""
    accessor = getattr(module, "get_output_embeddings", None)
    if accessor is None:
        return None
    try:
        head = accessor()
    except (AttributeError, NotImplementedError):  # models without a head do either
        return None
    return head if isinstance(head, nn.Linear) else None


def _name_reason(name: str) -> str | None:
    parts = name.split(".")
    if "lm_head" in name:
        return "output heads stay in high precision"
    if parts[-1] in ROUTER_NAMES or "router" in parts:
        return "mixture-of-experts routers stay in high precision"
    return None


def _module_reason(linear: nn.Linear) -> str | None:
    cls = type(linear)
    if isinstance(linear, FP8Linear):
        return "it is converted already"
    if cls.forward is not nn.Linear.forward or "forward" in linear.__dict__:
        return f"its class {cls.__name__} has a forward of its own"
    if linear._parameters.get("weight") is None:
        return "its weight is parametrised"
    if is_dtensor(linear.weight):
        return "its weight is a DTensor: it was sharded before the conversion, which has to come first"
    if linear.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its weight is {linear.weight.dtype}"
    return None


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
