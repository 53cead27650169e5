"""Versions as numbers, and those of what is installed."""

from __future__ import annotations

import importlib.metadata

__all__ = ["dotted", "installed", "release", "unpacked"]


def installed(package: str) -> str | None:
    """The version of a package as pip reports it, without importing it; ``None`` where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def unpacked(number: int) -> tuple[int, ...]:
    """As NVIDIA's libraries pack them: ``90501`` -> ``(9, 5, 1)``."""
    return number // 10000, number // 100 % 100, number % 100


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
