"""State that another version saved: what both know is taken, and the rest is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["taken"]


def taken(saved: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What to go on with: ``saved`` where ``own`` has such a name, else ``own``; and the names that one of both lacks."""
    return {name: saved.get(name, value) for name, value in own.items()}, sorted(saved.keys() ^ own.keys())
