"""Who runs the GEMMs, and how the choice is made.

To add a backend: write a :class:`~foundry_fp8.layers.backend.Backend`, name it in ``_CLASSES``, and place it in the order
of preference of ``AUTO_ORDER``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import cast

import torch

from foundry_fp8.compat.fake_tensor import dry_run
from foundry_fp8.config import check_choice
from foundry_fp8.layers.attention import AttentionRecipe, GradScores
from foundry_fp8.layers.backend import DEFAULT_OPTIONS, Availability, Backend, BackendOptions
from foundry_fp8.numerics.recipes import RECIPES, Recipe

__all__ = [
    "BACKENDS", "Availability", "Backend", "BackendOptions", "attention_left_out", "choose_backend", "load_backend",
]  # fmt: skip

_CLASSES = {
    "transformer_engine": "TransformerEngineBackend",
    "native": "NativeBackend",
    "emulated": "EmulatedBackend",
}

BACKENDS = tuple(_CLASSES)

AUTO_ORDER = {
    "cuda": ("native", "transformer_engine"),
    "cpu": ("emulated",),
    "dry run": ("native", "emulated"),
}
"""What ``backend: auto`` tries, in order: first what was measured faster (docs/results.md). On a GPU it never chooses emulation, which is slower than not using FP8.

A dry run is a plan for GPUs: it counts what the native kernels read, write and keep. Emulation is for machines without Triton.
"""


GRANULARITY = ("delayed", "current", "block", "mxfp8")
"""From the coarsest scales to the finest."""


def load_backend(name: str, options: BackendOptions = DEFAULT_OPTIONS) -> Backend:
    """Make the backend ``name``. Imports it, but nothing that it stands on (Triton, Transformer Engine)."""
    backend: Backend = getattr(importlib.import_module(f"{__name__}.{name}"), _CLASSES[name])(options)
    return backend


def attention_left_out(name: str, chosen: Backend, recipe: Recipe, grad_scores: GradScores) -> str | None:
    """Why ``auto`` leaves attention in high precision, or ``None`` where FP8 attention runs.

    Args:
        name: The backend that the YAML asks for.
        chosen: The one that runs the linears, and attention.
        recipe: Attention's.
        grad_scores: What the gradient of its logits is rounded to.
    """
    if name != "auto" or chosen.name not in AUTO_ORDER["cuda"]:  # emulation has no speed to lose
        return None
    runner = chosen.attention()
    refused = runner.recipe_reason(recipe, grad_scores)
    if refused is None:
        refused = runner.module_reason(cast(AttentionRecipe, recipe), None)
    return None if refused is None else f"attention stays in high precision: {chosen.name}: {refused}"


def choose_backend(
    name: str,
    recipe: Recipe | Sequence[Recipe],
    device: torch.device,
    key: str = "backend",
    options: BackendOptions = DEFAULT_OPTIONS,
) -> tuple[Backend, str]:
    """Resolve ``backend: name`` for one device and one recipe, or several.

    Args:
        name: One of ``BACKENDS``, or ``auto``.
        recipe: What it has to run, all of it.
        device: Where the model will run.
        key: The YAML key, for messages.
        options: What else is asked of it.

    Returns:
        The backend, and why it was chosen, for the log.

    Raises:
        ConfigError: Unknown name.
        RuntimeError: The backend cannot run the recipe here, with the reason and the way out; for ``auto``, that none can.
    """
    check_choice(key, name, ("auto", *BACKENDS))
    recipes = (recipe,) if isinstance(recipe, Recipe) else tuple(recipe)
    where = "dry run" if dry_run() else device.type
    order = AUTO_ORDER.get(where, AUTO_ORDER["cpu"]) if name == "auto" else (name,)
    backends = [load_backend(one, options) for one in order]
    refused: list[str] = []
    failed = recipes[0]
    for backend in backends:
        answers = ((one, backend.availability(one, device)) for one in recipes)
        refusal = next(((one, found) for one, found in answers if not found.ok), None)
        if refusal is None:
            passed_over = f" ({'; '.join(refused)})" if refused else ""
            auto = f"{key}: auto chose {backend.name} on {device}{passed_over}"
            return backend, auto if name == "auto" else f"{key}: {name}, as asked"
        failed, found = refusal
        of = f"{backend.name} ({failed.name}): " if len(recipes) > 1 else f"{backend.name}: "
        refused.append(f"{of if name == 'auto' else ''}{found.reason}. {found.remedy}".strip())
    nearest = _nearest(failed, backends, device)
    if name != "auto":
        raise RuntimeError(
            f"{key}: {name} cannot run the {failed.name} recipe on {device}: {refused[0]}{nearest}"
        )
    names = " and the ".join(f"{one.name} recipe" for one in recipes)
    raise RuntimeError(
        f"{key}: auto found no backend that runs the {names} on {device}. "
        + " ".join(refused)
        + " To check numerics without speed, set backend: emulated."
        + nearest
    )


def _nearest(recipe: Recipe, backends: Sequence[Backend], device: torch.device) -> str:
    """The recipe nearest to ``recipe`` in granularity that one of ``backends`` runs there, as a sentence; finer ones first."""
    place = {name: i for i, name in enumerate(GRANULARITY)}
    own = place.pop(recipe.name, None)
    near = [] if own is None else sorted(place, key=lambda n: (abs(place[n] - own), -place[n]))
    for name in near:
        for backend in backends:
            if backend.availability(RECIPES[name](), device).ok:
                return f" The nearest recipe that {backend.name} runs there is {name}."
    return ""
