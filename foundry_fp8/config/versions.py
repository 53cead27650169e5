"""Versions as numbers."""

from __future__ import annotations

__all__ = ["dotted", "release"]


def release(version: str) -> tuple[int, ...]:
    """``"2.8.0+cu12"`` -> ``(2, 8, 0)``."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def dotted(version: tuple[int, ...]) -> str:
    """The other way."""
    return ".".join(map(str, version))
