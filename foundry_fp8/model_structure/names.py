"""Module names as the user wrote the model: without what FSDP, checkpointing and ``torch.compile`` put in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["BESIDE_PARAMETERS", "clean_name", "named_modules_clean", "plain_name", "qualified_name"]

WRAPPER_PARTS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
BESIDE_PARAMETERS = "_fp8_products"
"""Holds a layer for each parameter of the module that it is in, without one of its own; such a layer goes by the parameter's name."""


def clean_name(name: str) -> str:
    """``name`` without the parts that wrappers add (FSDP1, ``CheckpointWrapper``, ``torch.compile``)."""
    return ".".join(part for part in name.split(".") if part not in (*WRAPPER_PARTS, BESIDE_PARAMETERS))


def plain_name(name: str) -> str:
    """The clean name, and of the layer that PEFT has put an adapter around the one that it had before."""
    return clean_name(name).replace(".base_layer", "")


def named_modules_clean(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules()`` under clean names; of a wrapper and what it wraps, what it wraps."""
    for name, module in model.named_modules():
        if name.endswith(BESIDE_PARAMETERS) or any(part in module._modules for part in WRAPPER_PARTS):
            continue
        yield clean_name(name), module


def qualified_name(cls: type[Any]) -> str:
    """Module and name of ``cls``."""
    return f"{cls.__module__}.{cls.__qualname__}"
