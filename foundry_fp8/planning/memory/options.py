"""What can be done with one block: which of its modules to checkpoint, how, and what to keep packed or only the inputs of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from foundry_fp8.activations.checkpointing.policy import Policy
from foundry_fp8.activations.checkpointing.targets import Selection
from foundry_fp8.activations.compression.apply import EXACT
from foundry_fp8.model_structure.names import clean_name

__all__ = ["BlockOption", "options_of"]


@dataclasses.dataclass(frozen=True)
class BlockOption:
    """One way to run a block.

    Attributes:
        name: As a table shows it.
        checkpoints: ``(module name inside the block, policy)``; the name is empty for the block itself.
        formats: ``(module name inside the block, format)`` of ``activation_compression``; the same.
    """

    name: str
    checkpoints: tuple[tuple[str, Policy], ...] = ()
    formats: tuple[tuple[str, str], ...] = ()

    def selections(self, block: str) -> list[Selection]:
        """What it checkpoints in the block of this name."""
        return [Selection(_inside(block, name), policy) for name, policy in self.checkpoints]

    def targets(self, block: str) -> dict[str, str]:
        """``{module: format}`` for ``activation_compression``, in the block of this name."""
        return {_inside(block, name): form for name, form in self.formats}


def _inside(block: str, name: str) -> str:
    return f"{block}.{name}" if name else block


def options_of(block: nn.Module, *, formats: Sequence[str] = ()) -> list[BlockOption]:
    """The candidates for ``block``, ``none`` first.

    Children that hold linears are sub-layers (attention, MLP); the other children with parameters are norms, whose
    recompute costs one pass over memory.
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
    # Of all: what the block's own checkpoint recomputes, less each layer's last matmul, where recompute stops.
    for names in [[layer] for layer in layers] + ([layers] if len(layers) > 1 else []):
        found.append(BlockOption(" + ".join(names), checkpoint(*names)))
        if norms:
            found.append(BlockOption(f"norms + {' + '.join(names)}", checkpoint(*norms, *names)))
    found += [BlockOption("selective", (("", "selective"),)), BlockOption("block", (("", "full"),))]
    for form in formats:
        found.append(BlockOption(form, formats=(("", form),)))
        found += [
            BlockOption(f"{form}, checkpoint {layer}", checkpoint(layer), (("", form),)) for layer in layers
        ]
        if form == EXACT:
            continue
        if EXACT in formats and len(layers) > 1:
            for layer in layers:
                mixed = (("", EXACT), (layer, form))
                found.append(BlockOption(f"exact, {layer} {form}", formats=mixed))
                found += [
                    BlockOption(f"exact, {layer} {form}, checkpoint {other}", checkpoint(other), mixed)
                    for other in layers
                    if other != layer
                ]
        if len(layers) > 1:
            both = checkpoint(*layers)
            found.append(BlockOption(f"{form}, checkpoint {' + '.join(layers)}", both, (("", form),)))
        found.append(BlockOption(f"{form}, checkpoint block", (("", "full"),), (("", form),)))
    return found
