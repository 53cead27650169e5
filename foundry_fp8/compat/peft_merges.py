"""Which adapters PEFT has merged into the weights below them.

Cause: ``merge`` and ``unmerge`` write ``weight.data += ...``, which moves neither the address nor the version counter of the weight
(https://github.com/huggingface/peft/blob/v0.16.0/src/peft/tuners/lora/layer.py, ``Linear.merge``); the list ``merged_adapters`` of the
layer above it is what changes. Remove when torch counts writes through ``.data``, or PEFT does not make them.
"""

from __future__ import annotations

from torch import nn

__all__ = ["merged_adapters"]


def merged_adapters(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of the merged adapters of each of PEFT's layers in ``model``; empty without PEFT."""
    return tuple(
        tuple(merged)
        for module in model.modules()
        if isinstance(merged := getattr(module, "merged_adapters", None), list)
    )
