"""The transformer blocks of a model, in one list or several (an encoder's and a decoder's)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from foundry_fp8.model_structure.experts import expert_count

__all__ = ["block_index_of", "block_label", "transformer_blocks", "transformer_stacks"]

Block = tuple[str, nn.Module]


def transformer_stacks(model: nn.Module) -> list[list[Block]]:
    """Every stack of repeated blocks, in the order of registration, each a list of ``(name, module)``.

    A stack is an ``nn.ModuleList`` whose children hold modules of their own, which is how MPT (``transformer.blocks``),
    Llama-style (``model.layers``), GPT-2-style (``transformer.h``), T5 (``encoder.block``, ``decoder.block``) and FOG hold
    theirs; the children may be of several classes (Jamba's). Lists inside a block (sublayers, experts) belong to it, and
    experts are no blocks anywhere. Where some lists hold attention, they are the stacks, and other lists (of heads, of
    convolutions) are not; where none does, the list with the most parameters is the only one.
    """
    found: list[list[Block]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or name.startswith(inside or ("\0",)):
            continue
        blocks = [(f"{name}.{part}" if name else part, child) for part, child in module.named_children()]
        if not blocks or expert_count(name, module) or not all(any(b.children()) for _, b in blocks):
            continue
        found.append(blocks)
        inside += (f"{name}.",)
    attending = [
        blocks
        for blocks in found
        if any("attention" in type(m).__name__.lower() for _, block in blocks for m in block.modules())
    ]
    largest = sorted(
        found, key=lambda stack: sum(p.numel() for _, block in stack for p in block.parameters())
    )[-1:]
    return attending or largest


def transformer_blocks(model: nn.Module) -> list[Block]:
    """The blocks of all stacks, one after the other, as ``(name, module)``. Empty where the model has none."""
    return [block for stack in transformer_stacks(model) for block in stack]


def block_index_of(name: str, blocks: Sequence[Block]) -> int | None:
    """The index of the block that holds the module ``name``, or ``None`` if it lies outside the blocks."""
    return next((i for i, (block, _) in enumerate(blocks) if f"{name}.".startswith(f"{block}.")), None)


def block_label(index: int | None) -> str:
    """What a block is called in logs: ``layer_003``; ``outside`` for what lies in none."""
    return "outside" if index is None else f"layer_{index:03d}"
