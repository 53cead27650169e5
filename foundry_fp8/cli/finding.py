"""What ``foundry-fp8 doctor RUN.yaml`` has to say, one thing each."""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = ["Finding", "Level"]

Level = Literal["ok", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that will happen."""

    topic: str
    level: Level
    text: str
