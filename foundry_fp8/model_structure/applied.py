"""What was made of a model, and with what settings: the same again goes on with it, others are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from foundry_fp8.config import Config, ConfigError

__all__ = ["applied", "forget", "remember"]

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
    for held in _marks(model):
        if config.key in held:
            before, result = held[config.key]
            pairs = {
                field.name: (getattr(before, field.name), getattr(config, field.name))
                for field in dataclasses.fields(before)
            }
            others = [f"{name}: {was!r}, here {now!r}" for name, (was, now) in pairs.items() if was != now]
            if others:
                raise ConfigError(
                    f"{config.key}: the model is {what} already, with other settings ({'; '.join(others)}). Apply it once, or with the same."
                )
            return result
    return None


def _marks(model: nn.Module) -> Iterator[dict[str, Any]]:
    return (vars(module)[MARK] for module in model.modules() if MARK in vars(module))
