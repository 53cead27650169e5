"""Who runs the GEMMs, and how the choice is made.

To add a backend: write a :class:`~foundry_fp8.layers.backend.Backend`, name it in ``_LOADERS``, and place it in the order
of preference of ``AUTO_ORDER``.
"""

from __future__ import annotations

import importlib

import torch

from foundry_fp8.config import check_choice
from foundry_fp8.layers.attention import AttentionBackend, GradScores
from foundry_fp8.layers.backend import Availability, Backend
from foundry_fp8.numerics.recipes import Recipe

__all__ = [
    "BACKENDS",
    "Availability",
    "Backend",
    "choose_attention_backend",
    "choose_backend",
    "load_attention_backend",
    "load_backend",
]

_LOADERS = {
    "transformer_engine": ("foundry_fp8.backends.transformer_engine", "TransformerEngineBackend"),
    "native": ("foundry_fp8.backends.native", "NativeBackend"),
    "emulated": ("foundry_fp8.backends.emulated", "EmulatedBackend"),
}

BACKENDS = tuple(_LOADERS)

_ATTENTION_LOADERS = {
    "transformer_engine": ("foundry_fp8.backends.transformer_engine.attention", "TransformerEngineAttention"),
    "native": ("foundry_fp8.backends.native.attention", "NativeAttention"),
    "emulated": ("foundry_fp8.backends.emulated.attention", "EmulatedAttention"),
}

AUTO_ORDER = {"cuda": ("transformer_engine", "native"), "cpu": ("emulated",)}
"""What ``backend: auto`` tries, in order. On a GPU it never chooses emulation, which is slower than not using FP8."""


def load_backend(name: str) -> Backend:
    """Make the backend ``name``. Imports it, but nothing that it stands on (Triton, Transformer Engine)."""
    module, cls = _LOADERS[name]
    backend: Backend = getattr(importlib.import_module(module), cls)()
    return backend


def load_attention_backend(name: str) -> AttentionBackend:
    """Make what runs FP8 attention in the backend ``name``."""
    module, cls = _ATTENTION_LOADERS[name]
    backend: AttentionBackend = getattr(importlib.import_module(module), cls)()
    return backend


def choose_attention_backend(
    name: str, chosen: str, recipe: Recipe, grad_scores: GradScores, device: torch.device
) -> AttentionBackend:
    """What runs FP8 attention beside linears.

    Args:
        name: The backend that the YAML asks for.
        chosen: The one that runs the linears.
        recipe: Attention's.
        grad_scores: What the gradient of its logits is rounded to.
        device: Where the model will run.

    Returns:
        ``chosen``'s own; under ``auto`` the native one where Transformer Engine cannot run ``recipe`` at all, and both of them, in that order,
        where it can.
    """
    own = load_attention_backend(chosen)
    if name != "auto" or chosen != "transformer_engine":
        return own
    native = load_attention_backend("native")
    if (
        native.recipe_reason(recipe, grad_scores)
        or not load_backend("native").availability(recipe, device).ok
    ):
        return own
    from foundry_fp8.backends.attention_choice import AttentionWithFallback

    both = AttentionWithFallback(own, native)
    refused = own.recipe_reason(recipe, grad_scores)
    if refused is not None:
        both.turn(refused)
    return both


def choose_backend(
    name: str, recipe: Recipe, device: torch.device, key: str = "backend"
) -> tuple[Backend, str]:
    """Resolve ``backend: name`` for one recipe and device.

    Args:
        name: One of ``BACKENDS``, or ``auto``.
        recipe: What it has to run.
        device: Where the model will run.
        key: The YAML key, for messages.

    Returns:
        The backend, and why it was chosen, for the log.

    Raises:
        ConfigError: Unknown name.
        RuntimeError: The backend cannot run the recipe here, with the reason and the way out; for ``auto``, that none can.
    """
    check_choice(key, name, ("auto", *BACKENDS))
    if name != "auto":
        backend = load_backend(name)
        found = backend.availability(recipe, device)
        if not found.ok:
            raise RuntimeError(
                f"{key}: {name} cannot run the {recipe.name} recipe on {device}: {found.reason}. {found.remedy}".strip()
            )
        return backend, f"{key}: {name}, as asked"

    refused: list[str] = []
    for candidate in AUTO_ORDER.get(device.type, AUTO_ORDER["cpu"]):
        backend = load_backend(candidate)
        found = backend.availability(recipe, device)
        if found.ok:
            passed_over = f" ({'; '.join(refused)})" if refused else ""
            return backend, f"{key}: auto chose {candidate} on {device}{passed_over}"
        refused.append(f"{candidate}: {found.reason}. {found.remedy}".strip())
    raise RuntimeError(
        f"{key}: auto found no backend that runs the {recipe.name} recipe on {device}. "
        + " ".join(refused)
        + " To check numerics without speed, set backend: emulated."
    )
