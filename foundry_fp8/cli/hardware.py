"""The option ``--hardware h100x8``: a kind of GPU, how many a run has, and which FP8 recipe it runs."""

from __future__ import annotations

import dataclasses
import re

from foundry_fp8.cli.selftest.verdict import gpu_here
from foundry_fp8.config import ConfigError, nearest
from foundry_fp8.gpus import GPUS, Gpu

__all__ = ["Hardware", "parse_hardware"]

PER_NODE = 8


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


def parse_hardware(text: str) -> Hardware:
    """Read ``h100x64``, or ``h100`` for eight.

    Raises:
        ConfigError: An unknown GPU, or not of this form.
    """
    found = re.fullmatch(r"([a-z]+[0-9]+[a-z]*(?:-[0-9]+g)?)(?:x([1-9][0-9]{0,5}))?", text.lower())
    if found is None or found[1] not in GPUS:
        hint = nearest("" if found is None else found[1], GPUS)
        raise ConfigError(f"--hardware: {text!r} is not like h100x8. Known: {', '.join(GPUS)}.{hint}")
    return Hardware(found[1], gpu_here(found[1]), int(found[2] or PER_NODE))
