"""The option ``--hardware h100x8``: a kind of GPU, how many a run has, and which FP8 recipe it runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from foundry_fp8.config import ConfigError, check_choice, nearest

__all__ = ["Hardware", "gpu_named", "parse_hardware"]

PER_NODE = 8


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU."""

    memory_bytes: float
    recipe: str | None
    """What ``recipe: auto`` chooses on it; ``None`` for a GPU without FP8 GEMMs."""


GPUS = {
    "a100": Gpu(80e9, None),
    "l40s": Gpu(48e9, "current"),
    "rtx4090": Gpu(24e9, "current"),
    "rtx5090": Gpu(32e9, "current"),
    "h100": Gpu(80e9, "current"),
    "h800": Gpu(80e9, "current"),
    "h20": Gpu(96e9, "current"),
    "h200": Gpu(141e9, "current"),
    "b200": Gpu(180e9, "mxfp8"),
    "gb200": Gpu(186e9, "mxfp8"),
    "b300": Gpu(270e9, "mxfp8"),
}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A number of GPUs of one kind, eight per node."""

    name: str
    gpu: Gpu
    devices: int

    @property
    def nodes(self) -> int:
        """Machines, the last of which may be in part empty."""
        return -(-self.devices // PER_NODE)


def gpu_named(text: str, known: Iterable[str]) -> str:
    """The one of ``known`` that ``--gpu`` means: ``h100`` and ``h100-sxm`` name the same GPU to every command.

    Raises:
        ConfigError: None of them.
    """
    names = list(known)
    alike = [name for name in names if name.partition("-")[0] == text.lower().partition("-")[0]]
    found = text.lower() if text.lower() in names else next(iter(alike), text)
    check_choice("--gpu", found, tuple(names))
    return found


def parse_hardware(text: str) -> Hardware:
    """Read ``h100x64``, or ``h100`` for eight.

    Raises:
        ConfigError: An unknown GPU, or not of this form.
    """
    found = re.fullmatch(r"([a-z]+[0-9]+[a-z]*)(?:x([1-9][0-9]{0,5}))?", text.lower())
    if found is None or found[1] not in GPUS:
        hint = nearest("" if found is None else found[1], GPUS)
        raise ConfigError(f"--hardware: {text!r} is not like h100x8. Known: {', '.join(GPUS)}.{hint}")
    return Hardware(found[1], GPUS[found[1]], int(found[2] or PER_NODE))
