"""What ``compressed_communication`` takes, and what is allowed."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from foundry_fp8.config import ConfigError, check_choice, check_integer, parse_bytes
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["KEY", "CompressionConfig", "parse_batches"]

KEY = "algorithms.compressed_communication"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """What travels how. Defaults and checks live here alone."""

    gradients: Literal["none", "bf16", "int8", "e4m3", "int4"] = "int8"
    """What gradients travel as. ``int4`` is for the legs that replicate (DDP, the across-nodes leg of HSDP) only."""
    parameters: Literal["none", "e4m3", "int8"] = "none"
    """What FSDP's all-gather of parameters travels as, from the first step on. The sharded master weights, the
    optimizer and checkpoints keep their precision."""
    block_size: int = 128
    """Elements that share one float32 scale: a power of two from 32 to 65536."""
    second_leg: Literal["fp32", "bf16", "int8", "e4m3", "int4"] = "bf16"
    """What the second half of an all-reduce (DDP, the replicate leg) travels as."""
    error_feedback: Literal["auto"] | bool = "auto"
    """Carry what quantising lost to the next step, on the legs that replicate. ``auto`` does so for every format but
    ``bf16``. It costs a float32 gradient on every rank under DDP and a gradient shard under HSDP; under plain FSDP it
    would cost a whole gradient on every rank and is refused."""
    warmup: str | int = "100ba"
    """Batches before gradients are compressed."""
    min_bytes: str | int = "64KiB"
    """Gradient buckets and parameters below this size stay uncompressed."""
    scope: Literal["auto", "inter_node", "all"] = "auto"
    """``inter_node`` compresses only what crosses nodes and works in two hops where a group spans them; ``all``
    compresses every hop; ``auto`` is ``inter_node`` on several nodes and ``all`` on one."""
    inside_node: Literal["fp32", "int8"] = "fp32"
    """What the hop inside a node travels as where there are two hops. ``fp32`` loses nothing."""
    verify: bool = False
    """Debug mode: every message carries a checksum, and a damaged one is an error."""
    sample_interval: str | int = "50ba"
    """How often the quantisation error is measured; ``0ba`` never."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("gradients", ("none", "bf16", "int8", "e4m3", "int4")),
            ("parameters", ("none", "e4m3", "int8")),
            ("second_leg", ("fp32", "bf16", "int8", "e4m3", "int4")),
            ("scope", ("auto", "inter_node", "all")),
            ("inside_node", ("fp32", "int8")),
        ):
            check_choice(f"{KEY}.{name}", getattr(self, name), allowed)
        if self.gradients == "none" and self.parameters == "none":
            raise ConfigError(
                f"{KEY}: gradients and parameters are both none. Name a format, or remove {KEY}."
            )
        if self.error_feedback not in ("auto", True, False):
            raise ConfigError(f"{KEY}.error_feedback: {self.error_feedback!r} is not auto, true or false.")
        if self.error_feedback is True and self.gradients in ("none", "bf16"):
            raise ConfigError(
                f"{KEY}.error_feedback: true, but gradients: {self.gradients} loses nothing worth carrying. "
                "Use auto, or a gradients format of int8, e4m3 or int4."
            )
        if not isinstance(self.verify, bool):
            raise ConfigError(f"{KEY}.verify: {self.verify!r} is not true or false.")
        WireFormat(name="int8", block_size=self.block_size)
        parse_batches("warmup", self.warmup)
        parse_batches("sample_interval", self.sample_interval)
        parse_bytes(self.min_bytes, f"{KEY}.min_bytes")

    @property
    def warmup_batches(self) -> int:
        """``warmup`` as a number."""
        return parse_batches("warmup", self.warmup)

    @property
    def sample_batches(self) -> int:
        """``sample_interval`` as a number."""
        return parse_batches("sample_interval", self.sample_interval)

    @property
    def least_bytes(self) -> int:
        """``min_bytes`` as a number."""
        return parse_bytes(self.min_bytes, f"{KEY}.min_bytes")

    @property
    def feeds_back(self) -> bool:
        """Whether the legs that replicate keep a residual."""
        if self.error_feedback == "auto":
            return self.gradients in ("int8", "e4m3", "int4")
        return bool(self.error_feedback)

    def wire(self, name: str) -> WireFormat | None:
        """The wire format called ``name``; ``None`` for ``none``."""
        if name == "none":
            return None
        return WireFormat(name=name, block_size=self.block_size, checksum=self.verify)  # type: ignore[arg-type]


def parse_batches(name: str, value: str | int) -> int:
    """``100ba`` or ``100`` as 100; raises :class:`ConfigError` for any other unit."""
    found = re.fullmatch(r"(\d+)ba", value) if isinstance(value, str) else None
    if found:
        return int(found[1])
    if isinstance(value, str):
        raise ConfigError(f"{KEY}.{name}: {value!r} is not a number of batches. Write it like 100ba.")
    check_integer(f"{KEY}.{name}", value)
    return value
