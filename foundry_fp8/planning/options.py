"""What can be done with one block: which of its modules to checkpoint, how, and whether to compress what it saves."""

from __future__ import annotations

import dataclasses

from torch import nn

from foundry_fp8.activations.wrapping import clean_name
from foundry_fp8.algorithms.activation_checkpointing.policy import Policy

__all__ = ["BlockOption", "options_of"]


@dataclasses.dataclass(frozen=True)
class BlockOption:
    """One way to run a block.

    Attributes:
        name: As a table shows it.
        checkpoints: ``(module name inside the block, policy)``; the name is empty for the block itself.
        compress: Whether what the block saves is packed.
    """

    name: str
    checkpoints: tuple[tuple[str, Policy], ...] = ()
    compress: bool = False


def options_of(block: nn.Module, *, compress: bool) -> list[BlockOption]:
    """The candidates for ``block``, ``none`` first.

    Children that hold linears are sub-layers (attention, MLP); the other children with parameters are norms, whose
    recompute costs one pass over memory.

    Args:
        block: A transformer block.
        compress: Offer compression too.
    """
    layers, norms = [], []
    for name, child in block.named_children():
        linears = [m for m in child.modules() if isinstance(m, nn.Linear)]
        if linears and not isinstance(child, nn.Linear):
            layers.append(clean_name(name))
        elif not linears and any(True for _ in child.parameters()):
            norms.append(clean_name(name))

    def checkpoint(*names: str) -> tuple[tuple[str, Policy], ...]:
        return tuple((name, "full") for name in names)

    found = [BlockOption("none")]
    if norms:
        found.append(BlockOption("norms", checkpoint(*norms)))
    for layer in layers:
        found.append(BlockOption(layer, checkpoint(layer)))
        if norms:
            found.append(BlockOption(f"norms + {layer}", checkpoint(*norms, layer)))
    if len(layers) > 1:
        found.append(BlockOption(" + ".join(layers), checkpoint(*layers)))
        if (
            norms
        ):  # what the block's own checkpoint recomputes, less each layer's last matmul, where recompute stops
            found.append(BlockOption(f"norms + {' + '.join(layers)}", checkpoint(*norms, *layers)))
    found += [
        BlockOption("selective", (("", "selective"),)),
        BlockOption("block", (("", "full"),)),
    ]
    if compress:
        found.append(BlockOption("compressed", compress=True))
        found += [BlockOption(f"compressed, {x}", checkpoint(x), compress=True) for x in layers]
        if len(layers) > 1:
            found.append(BlockOption(f"compressed, {' + '.join(layers)}", checkpoint(*layers), compress=True))
        found.append(BlockOption("compressed, block", (("", "full"),), compress=True))
    return found
