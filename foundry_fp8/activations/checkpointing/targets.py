"""From what a YAML names to modules: registry names, class names and patterns, on any decoder.

A target's name is tried as, in this order:

1. a name LLM Foundry knows (``mptblock``, ``grouped_query_attention``, ``mptmlp``, ...), when LLM Foundry is loaded;
2. the class name of a module inside the blocks (``LlamaDecoderLayer``), subclasses included;
3. an :mod:`fnmatch` pattern on whole module names (``*.self_attn``).

Foundry's overlap rule (one target a block) holds between names of the first two kinds. Patterns are for what that rule
forbids, such as attention and MLP of one block checkpointed apart; there, and everywhere, a selected module may not lie
inside another selected module.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from torch import nn

from foundry_fp8.activations.checkpointing.policy import CheckedPolicy, Policy
from foundry_fp8.config import Config, ConfigError, NoEffect, Text, accept, nearest, not_empty
from foundry_fp8.model_structure.block_numbers import Blocks, parse_blocks
from foundry_fp8.model_structure.blocks import transformer_blocks
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.model_structure.wrappers import has_forward, own_class

__all__ = ["Selection", "Target", "Targets", "check_overlap", "normalize_targets", "select"]


Classes = type | tuple[type, ...]
EVERY_BLOCK = "<blocks>"
"""The target that no target stands for; no module and no class can be called so."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(Config):
    """One target. In a YAML: a mapping with these keys, for what ``{name: blocks}`` cannot say."""

    target: Text
    """Registry name, class name, or fnmatch pattern on module names."""
    blocks: Blocks | None = None
    """Which blocks, in the grammar of :mod:`foundry_fp8.model_structure.block_numbers`; ``None`` for all."""
    policy: CheckedPolicy | None = None
    """Overrides the policy of the algorithm for these modules."""


Targets = Text | Sequence[Text] | Sequence[Target] | Annotated[Mapping[Text, Blocks], not_empty] | None
"""As a YAML has them."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """A module to checkpoint."""

    name: str
    policy: Policy


def normalize_targets(targets: Targets, key: str) -> tuple[list[Target], bool]:
    """The targets as a list, and whether names of one class are merged (Foundry's forms) or kept apart (mappings).

    Args:
        targets: ``None`` or ``[]`` (all blocks), a name, a list of names, a mapping of names to blocks, or a list of
            mappings with the keys of :class:`Target`.
        key: The YAML key, for messages.
    """
    given = accept(Targets, targets, key)
    if not given:
        return [Target(target=EVERY_BLOCK)], True
    if isinstance(given, str):
        return [Target(target=given)], True
    if isinstance(given, Mapping):
        return [Target(target=name, blocks=blocks) for name, blocks in given.items()], True
    if isinstance(given[0], Target):
        return list(given), False
    return [Target(target=name) for name in given], True


def select(model: nn.Module, targets: Targets, policy: Policy, key: str) -> list[Selection]:
    """The modules of ``model`` that ``targets`` names.

    Args:
        model: Plain, or wrapped in DDP or FSDP (names are those of the plain model).
        targets: See :func:`normalize_targets`.
        policy: For targets without their own.
        key: The YAML key, for messages.

    Returns:
        In the order of the model. Empty only where the block numbers select nothing (``first-0``).

    Raises:
        ConfigError: An unknown name (lists what the model has), blocks not of the grammar, overlapping targets, one
            selected module inside another, or a model without a list of blocks.
    """
    blocks = transformer_blocks(model)
    if not blocks:
        raise NoEffect(f"{key}: {type(model).__name__} has no list of transformer blocks to checkpoint.")
    # FSDP and checkpoint wrappers share the clean name of what they wrap and come first: the innermost module stays.
    inside = [
        {clean_name(f"{name}.{sub}" if sub else name): module for sub, module in block.named_modules()}
        for name, block in blocks
    ]
    lists = [name for block in inside for name, module in block.items() if not has_forward(module)]
    inside = [{name: module for name, module in block.items() if has_forward(module)} for block in inside]
    entries, merge = normalize_targets(targets, key)
    every = frozenset(range(len(blocks)))

    def blocks_of(entry: Target) -> frozenset[int]:
        if entry.blocks is None:
            return every
        return parse_blocks(entry.blocks, len(blocks), f"{key}.{entry.target}")

    for entry in entries:  # also those that a later spelling of the same class replaces
        blocks_of(entry)
    called = [name for block in inside for name in block]
    for entry in entries:
        found = fnmatch.filter(lists, entry.target)
        if found and not fnmatch.filter(called, entry.target):
            raise ConfigError(
                f"{key}: {entry.target!r} names {found[0]}, which holds modules and is never called itself. Name what it holds: "
                f"{entry.target}.*"
            )
    classes, patterns = _resolve(entries, merge, inside, key)
    by_class = [(cls, entry, blocks_of(entry)) for cls, entry in classes]
    by_pattern = [(entry, blocks_of(entry)) for entry in patterns]
    check_overlap(((entry.target, chosen) for _, entry, chosen in by_class), key)

    selected: list[Selection] = []
    for index, modules in enumerate(inside):
        root = clean_name(blocks[index][0])
        for name, module in modules.items():
            # As in Foundry, the first class that fits decides, also where its blocks leave this one out. A block may hold
            # another of a block's class (Zamba's, a Mamba layer).
            meant = (c for c, e, _ in by_class if e.target != EVERY_BLOCK or name == root)
            first = next((c for c in meant if isinstance(module, c)), None)
            hits = [e for cls, e, chosen in by_class if cls is first and index in chosen]
            hits += [e for e, chosen in by_pattern if index in chosen and fnmatch.fnmatchcase(name, e.target)]
            if len(hits) > 1:
                raise ConfigError(
                    f"{key}: {name} is named by both {hits[0].target!r} and {hits[1].target!r}."
                )
            if hits:
                selected.append(Selection(name, hits[0].policy or policy))
    names = [one.name for one in selected]
    for name in names:
        outer = next((other for other in names if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigError(
                f"{key}: {name} lies inside {outer}, which is checkpointed too: its forward would run three "
                "times. Select one of them."
            )
    return selected


def check_overlap(chosen: Iterable[tuple[str, frozenset[int]]], key: str) -> None:
    """Raise if two targets share a block: LLM Foundry's rule, one granularity a block."""
    owner: dict[int, str] = {}
    for target, blocks in chosen:
        for block in sorted(blocks):
            if block in owner:
                raise ConfigError(
                    f"{key}: block {block} belongs to both {owner[block]!r} and {target!r}. Each block takes one "
                    "granularity of activation checkpointing; give the targets disjoint blocks, or name modules by "
                    'pattern ("*.self_attn"), where only nested modules exclude each other.'
                )
            owner[block] = target


def _resolve(
    entries: Sequence[Target], merge: bool, inside: Sequence[Mapping[str, nn.Module]], key: str
) -> tuple[list[tuple[Classes, Target]], list[Target]]:
    """Split the targets into ``(class, target)`` pairs and patterns."""
    modules = {name: module for block in inside for name, module in block.items()}
    present: dict[str, type] = {}
    for module in modules.values():
        own = own_class(module)
        present.setdefault(own.__name__, own)
    classes: list[tuple[Classes, Target]] = []
    patterns: list[Target] = []
    for entry in entries:
        cls = _class_named(entry.target, inside, present)
        if cls is None:
            if not any(fnmatch.fnmatchcase(name, entry.target) for name in modules):
                raise ConfigError(_unknown(entry.target, present, list(modules), key))
            patterns.append(entry)
        elif not any(isinstance(module, cls) for module in modules.values()):
            raise ConfigError(_unknown(entry.target, present, list(modules), key))
        elif merge and any(cls is other for other, _ in classes):
            # {"mptblock": ..., "MPTBlock": ...} is one class: as in Foundry, the later one replaces the earlier.
            classes = [(other, entry if other is cls else old) for other, old in classes]
        else:
            classes.append((cls, entry))
    return classes, patterns


def _class_named(
    name: str, inside: Sequence[Mapping[str, nn.Module]], present: Mapping[str, type]
) -> Classes | None:
    # Of all classes that there are: an encoder's and a decoder's, attention's and Mamba's.
    if name == EVERY_BLOCK:
        return tuple(dict.fromkeys(own_class(next(iter(block.values()))) for block in inside))
    # A model made of Foundry's classes has imported Foundry; without it none of its names can match.
    foundry = sys.modules.get("llmfoundry.models.utils.act_ckpt")
    if foundry is not None:
        try:
            cls = foundry.get_act_ckpt_module(name)
        except ValueError:  # what it raises for a name it does not know
            cls = None
        if isinstance(cls, type):
            return cls
    if name in present:
        return present[name]
    return {known.lower(): cls for known, cls in present.items()}.get(name.lower())


def _unknown(name: str, present: Mapping[str, type], modules: Sequence[str], key: str) -> str:
    block = modules[0]
    names = [module.removeprefix(f"{block}.") for module in modules[1:] if module.startswith(f"{block}.")]
    return (
        f"{key}: {name!r} names nothing in this model. Its blocks ({block}, ...) hold the classes "
        f"{', '.join(present)}, and the modules {', '.join(f'*.{n}' for n in names[:12])}"
        f"{', ...' if len(names) > 12 else ''}.{nearest(name, [*present, *names])}"
    )
