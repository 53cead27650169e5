"""Which modules: include and exclude patterns on whole names, and the transformer blocks of a model.

The one form of selection in this package. Patterns are :mod:`fnmatch` globs on the fully qualified module name, so
``*.ffn.*`` and ``*.layers.1.*`` mean what they say (``layers.1`` does not take ``layers.10``). A pattern that matches
nothing is an error. Blocks are counted from 0.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from torch import nn

from foundry_fp8.config import ConfigError, nearest

__all__ = ["block_index_of", "check_patterns_match", "matches", "transformer_blocks"]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` matches any of the globs (case-sensitive)."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns_match(patterns: Sequence[str], names: Sequence[str], key: str, what: str) -> None:
    """Raise if a pattern matches none of ``names``.

    Args:
        patterns: Globs.
        names: The names there are.
        key: The YAML key, for the message.
        what: What the names are ("linear layers"), for the message.

    Raises:
        ConfigError: Names the pattern and the nearest name.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            close = nearest(pattern.strip("*."), names)
            shown = ", ".join(list(names)[:4]) + (", ..." if len(names) > 4 else "")
            raise ConfigError(
                f"{key}: pattern {pattern!r} matches none of the model's {len(names)} {what} ({shown}).{close}"
            )


def transformer_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a decoder, in order, as ``(name, module)``.

    They are the children of the ``nn.ModuleList`` with the most parameters whose children are all of one class, which
    is how MPT (``transformer.blocks``), Llama-style (``model.layers``) and GPT-2-style (``transformer.h``) models, and
    FOG, hold them. Lists inside such a block (experts) are passed over. Empty where the model has no such list.
    """
    best: list[tuple[str, nn.Module]] = []
    best_size = 0
    taken: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0 or name.startswith(taken or ("\0",)):
            continue
        children = list(module.named_children())
        # A checkpoint around some of the blocks does not make them blocks of another kind.
        if len({type(child._modules.get("_checkpoint_wrapped_module", child)) for _, child in children}) != 1:
            continue
        size = sum(p.numel() for p in module.parameters())
        if size > best_size:
            best = [(f"{name}.{child_name}" if name else child_name, child) for child_name, child in children]
            best_size = size
        taken += (f"{name}.",)
    return best


def block_index_of(name: str, blocks: Sequence[tuple[str, nn.Module]]) -> int | None:
    """The index of the block that holds the module ``name``, or ``None`` if it lies outside the blocks."""
    for index, (block_name, _) in enumerate(blocks):
        if name == block_name or name.startswith(f"{block_name}."):
            return index
    return None
