"""``foundry-fp8 doctor RUN.yaml --probe``: what FP8 does to each block of a run, measured on a batch of its own data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from foundry_fp8.cli.composer_checkpoint import load_checkpoint
from foundry_fp8.cli.yaml_run import run_of
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import Recipe, parse_recipe
from foundry_fp8.observe.guard.config import GuardConfig
from foundry_fp8.observe.precision_probe import PrecisionProbe, Recipes, first_rows
from foundry_fp8.observe.unchanged_state import FP8Layer
from foundry_fp8.surgery.fp8_config import FP8Config

__all__ = ["Probed", "fp8_config", "model_and_batch", "probe_run", "render"]

LAYERS_OF = 3
"""Blocks whose layers are measured one by one: the worst ones above the limit."""


@dataclasses.dataclass(frozen=True)
class Probed:
    """Relative errors of the gradient, worst block, with one unit in FP8 and all others in high precision.

    Attributes:
        recipe: The configured recipe; ``policy`` where layers have several.
        errors: By unit (``all layers``, a block, a layer), by recipe; a recipe that the backend does not run there is left out.
        layers: The units that are layers.
        limit: The guard's ``gradient_limit``.
        passes: Forwards and backwards that it took.
    """

    recipe: str
    errors: Mapping[str, Mapping[str, float]]
    layers: Sequence[str]
    limit: float
    passes: int

    def exclude(self) -> list[str]:
        """The layers above the limit in the configured recipe."""
        return [layer for layer in self.layers if not self.errors[layer][self.recipe] < self.limit]


def probe_run(yaml: Path, load: Path | None = None, *, trust: bool = False) -> Probed:
    """Build the model and one batch of a YAML, convert it, and measure each block in each recipe that its backend runs.

    Args:
        yaml: An LLM Foundry training YAML with ``algorithms.fp8`` and ``train_loader``.
        load: A whole checkpoint of Composer, whose weights are used; otherwise they are fresh ones.
        trust: See :func:`read_yaml`; of the checkpoint too.

    Raises:
        ConfigError: What is needed is missing in the YAML, or the checkpoint is not of this model.
    """
    import foundry_fp8
    from foundry_fp8.cli.yaml_model import read_yaml

    config = read_yaml(yaml, trust=trust)
    fp8 = fp8_config(config)
    model, batch, loss_of = model_and_batch(config, load, 2, "--probe", trust=trust)
    foundry_fp8.apply_fp8(model, **fp8.given)
    for _, state in FP8State.each(model):
        state.turn_to(lambda turn: turn.recipe is not None, torch.device("cpu"))
    probe = PrecisionProbe(model, loss_of)
    if not probe.layers:
        raise ConfigError(
            "algorithms.fp8: no layer of this model runs FP8; foundry-fp8 doctor RUN.yaml says why."
        )
    loss_of(model, batch).backward()  # so that delayed scaling knows amaxes
    model.zero_grad()
    limit = GuardConfig().gradient_limit
    with probe.on(batch) as measure:
        errors, layers = _measure(probe, lambda recipes: measure(recipes).worst[1], limit)
    recipe = next(iter(errors["all layers"]))
    return Probed(recipe, errors, layers, limit, probe.passes)


def fp8_config(config: Mapping[str, Any]) -> FP8Config:
    """The YAML's ``algorithms.fp8``, switched on; a :class:`ConfigError` if there is none."""
    found = run_of(config).fp8
    if found is None:
        raise ConfigError("algorithms.fp8: it is not in the YAML; foundry-fp8 init adds it.")
    return dataclasses.replace(found, enabled=True)


def model_and_batch(
    config: dict[str, Any], load: Path | None, rows: int, option: str, *, trust: bool = False
) -> tuple[Any, Any, Callable[[nn.Module, Any], Tensor]]:
    """The YAML's model on the CPU, in training mode, some rows of its data, and the loss of a training forward.

    Raises:
        ConfigError: The YAML has no data, which ``option`` needs, or the checkpoint ``load`` is not of this model.
    """
    from foundry_fp8.callbacks.base import total_loss
    from foundry_fp8.cli.yaml_model import build_yaml_model

    batch = first_rows(_first_batch(config, option), rows)
    model = build_yaml_model(config, "cpu").train()
    if load is not None:
        _load(model, load, trust)

    def loss_of(module: nn.Module, batch: Any) -> Tensor:
        return total_loss(model.loss(module(batch), batch))

    return model, batch, loss_of


def _measure(
    probe: PrecisionProbe, error_of: Callable[[Recipes], float], limit: float
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Errors by unit and recipe; the units that are layers."""
    # Of experts that were converted in part the others have a layer too.
    converted = {name: layer for name, layer in probe.layers.items() if layer.configured_recipe is not None}
    several = len({layer.configured_recipe for layer in converted.values()}) > 1
    recipes = {name: _recipes(layer, "policy" * several) for name, layer in converted.items()}
    units: dict[str, list[str]] = {"all layers": list(converted)}
    for name in converted:
        units.setdefault(probe.block_of(name), []).append(name)

    def errors(names: Sequence[str]) -> dict[str, float]:
        return {
            recipe: error_of({name: recipes[name][recipe] for name in names if recipe in recipes[name]})
            for recipe in recipes[names[0]]
        }

    found = {unit: errors(names) for unit, names in units.items()}
    configured = {unit: next(iter(found[unit].values())) for unit in units if unit != "all layers"}
    worst = sorted(configured, key=lambda unit: -configured[unit])[:LAYERS_OF]
    layers = [name for unit in worst if not configured[unit] < limit for name in units[unit]]
    return found | {name: errors([name]) for name in layers}, layers


def _recipes(layer: FP8Layer, label: str = "") -> dict[str, Recipe]:
    """The configured recipe (as ``label``, if there is one), then those that can take its place without a conversion, by name."""
    own = layer.configured_recipe
    assert own is not None  # it was just converted
    found: dict[str, Recipe] = {label or own.name: own}
    for name in ("current", "block", "mxfp8") if isinstance(layer, FP8GemmLayer) else ():
        recipe = parse_recipe(name)
        if name not in found and layer.can_run(recipe, torch.device("cpu")):
            found[name] = recipe
    return found


def _first_batch(config: Mapping[str, Any], option: str) -> Any:
    from llmfoundry.data.dataloader import build_dataloader
    from llmfoundry.utils.builders import build_tokenizer

    loader, tokenizer = config.get("train_loader"), config.get("tokenizer")
    if not isinstance(loader, Mapping):
        raise ConfigError(f"train_loader: it is missing, and {option} measures on a batch of it.")
    if not isinstance(tokenizer, Mapping):
        raise ConfigError("tokenizer: it is missing, and train_loader needs it.")
    options = {**loader, "num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    try:
        built = build_tokenizer(tokenizer["name"], dict(tokenizer.get("kwargs") or {}))
        return next(iter(build_dataloader(options, built, 8).dataloader))
    except Exception as error:  # a hub's, a file's, a dataset's
        raise ConfigError(
            f"tokenizer or train_loader: no batch of them, which {option} needs: {error}"
        ) from error


def _load(model: nn.Module, path: Path, trust: bool) -> None:
    content = load_checkpoint(path, trust)
    try:
        model.load_state_dict(content["state"]["model"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(f"--load {path}: not a whole Composer checkpoint of this model: {error}") from error


def render(probed: Probed) -> Table:
    """The table; errors above the limit are red."""
    recipes = list(dict.fromkeys(recipe for of_unit in probed.errors.values() for recipe in of_unit))
    title = f"Error of the gradient, worst block, with only this in FP8 ({probed.passes} passes)"
    table = Table("unit", *recipes, title=title)
    for unit, of_unit in probed.errors.items():
        cells = [f"{of_unit[recipe]:.1%}" if recipe in of_unit else "" for recipe in recipes]
        marked = [
            f"[red]{c}[/]" if c and not of_unit[r] < probed.limit else c
            for r, c in zip(recipes, cells, strict=True)
        ]
        table.add_row(unit, *marked)
    return table
