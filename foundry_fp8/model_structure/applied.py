"""What was made of a model, and with what settings: the same again goes on with it, others are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from foundry_fp8.config import Config, ConfigError

__all__ = ["MARK", "applied", "forget", "remember"]

MARK = "_foundry_fp8_applied"


def remember(model: nn.Module, config: Config, result: Any) -> None:
    """``result`` is what ``config`` made of ``model``."""
    vars(model).setdefault(MARK, {})[config.key] = (config, result)


def forget(model: nn.Module, key: str) -> None:
    """It was undone."""
    for held in _marks(model):
        held.pop(key, None)


def applied(model: nn.Module, config: Config, what: str = "converted") -> Any:
    """What ``config`` made of ``model`` before, wrapped since or not; ``None`` where nothing did.

    Raises:
        ConfigError: Other settings of the same algorithm did.
    """
    before, result = next((held[config.key] for held in _marks(model) if config.key in held), (config, None))
    names = [field.name for field in dataclasses.fields(config) if getattr(before, field.name) != getattr(config, field.name)]  # type: ignore[arg-type]  # fmt: skip
    if names:
        others = "; ".join(
            f"{name}: {getattr(before, name)!r}, here {getattr(config, name)!r}" for name in names
        )
        raise ConfigError(f"{config.key}: the model is {what} already, with other settings ({others}). Apply it once.")  # fmt: skip
    return result


def _marks(model: nn.Module) -> Iterator[dict[str, Any]]:
    return (vars(module)[MARK] for module in model.modules() if MARK in vars(module))
