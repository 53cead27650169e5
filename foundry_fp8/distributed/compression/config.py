"""What ``compressed_communication`` takes, and what is allowed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from foundry_fp8.config import Batches, Bytes, Config, ConfigError, power_of_two
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["KEY", "CompressionConfig"]

KEY = "algorithms.compressed_communication"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressionConfig(Config):
    """What travels how."""

    key = KEY
    deprecated: ClassVar = {"verify": lambda _: {}}

    gradients: Literal["none", "bf16", "int8", "e4m3", "int4"] = "int8"
    """What gradients travel as. ``int4`` is for the legs that replicate (DDP, the across-nodes leg of HSDP) only."""
    parameters: Literal["none", "e4m3", "int8"] = "none"
    """What FSDP's all-gather of parameters travels as, from the first step on. The sharded master weights, the
    optimizer and checkpoints keep their precision."""
    activations: Literal["none", "fp8"] = "none"
    """``fp8``: tensor parallelism gathers sequence shards before a column-wise FP8 linear with one scale a tensor as the codes that the
    linear makes of them, whatever ``scope``, ``warmup`` and ``min_bytes``. Exact: outputs and gradients stay the same to the bit."""
    block_size: Annotated[int, power_of_two(32, 65536)] = 128
    """Elements that share one float32 scale."""
    second_leg: Literal["auto", "fp32", "bf16", "int8", "e4m3", "int4"] = "auto"
    """What the second half of an all-reduce (DDP, the replicate leg) travels as. ``auto`` is the format of the gradients, int8 for
    int4: with error feedback its loss is carried as the first half's is."""
    error_feedback: Literal["auto"] | bool = "auto"
    """Carry what quantising lost to the next step, on the legs that replicate. ``auto`` does so for every format but
    ``bf16``. It costs a float32 gradient on every rank under DDP and a gradient shard under HSDP; under plain FSDP it
    would cost a whole gradient on every rank and is refused."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How gradients round on the legs that shard (FSDP's reduce-scatter), where error feedback does not reach. ``stochastic`` has
    no bias, at twice the squared error on the average."""
    warmup: Batches = 100
    """Batches before gradients are compressed, such as ``100ba``."""
    min_bytes: Bytes = 2**16
    """Gradient buckets and parameters below this size (``64KiB``) stay uncompressed, and so do vectors of any size."""
    scope: Literal["auto", "inter_node", "all"] = "auto"
    """``inter_node`` compresses only what crosses nodes and works in two hops where a group spans them; ``all``
    compresses every hop; ``auto`` is ``inter_node`` on several nodes and ``all`` on one."""
    inside_node: Literal["auto", "exact", "int8"] = "auto"
    """What the hop inside a node travels as where there are two hops. ``exact`` sends gradients in their own dtype and loses nothing.
    ``auto`` is ``int8`` for FSDP's reduce-scatter of coded gradients, as in ZeRO++, and ``exact`` where error feedback carries on what
    is lost."""
    adapt: bool = True
    """Measure, 20 batches after the warm-up and every 500 batches, how long steps take with the format of the gradients, in bfloat16 and
    uncompressed, and go on with the fastest. ``false`` keeps the format."""
    sample_interval: Batches = 50
    """Batches between two measurements of the quantisation error; 0 for never."""
    check_replicas: bool = True
    """Compare the bits of all replicas when attaching and after the first optimizer step, and raise if they differ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if {self.gradients, self.parameters, self.activations} == {"none"}:
            raise ConfigError(
                f"{KEY}.gradients: none, and parameters and activations too: that compresses nothing. Name a format, or remove {KEY}."
            )
        if self.error_feedback is True and self.gradients in ("none", "bf16"):
            raise ConfigError(
                f"{KEY}.error_feedback: true, but gradients: {self.gradients} loses nothing worth carrying. "
                "Use auto, or a gradients format of int8, e4m3 or int4."
            )
        if self.rounding == "stochastic" and self.gradients in ("none", "bf16"):
            raise ConfigError(
                f"{KEY}.rounding: stochastic, but gradients: {self.gradients} are not quantised. Use nearest, or a gradients format "
                "of int8, e4m3 or int4."
            )

    @property
    def uses_error_feedback(self) -> bool:
        """Whether the legs that replicate keep a residual."""
        if self.error_feedback == "auto":
            return self.gradients in ("int8", "e4m3", "int4")
        return bool(self.error_feedback)

    @property
    def second_leg_wire(self) -> WireFormat | None:
        """The wire format of the second half of an all-reduce."""
        auto = "int8" if self.gradients == "int4" else self.gradients
        return self.wire(auto if self.second_leg == "auto" else self.second_leg)

    @property
    def shard_wire(self) -> WireFormat | None:
        """The wire format of a reduce-scatter, where int4 is too coarse: nothing carries what it loses."""
        return self.wire("int8" if self.gradients == "int4" else self.gradients)

    def inside_wire(self, *, shards: bool) -> WireFormat | None:
        """The wire format of the hop inside a node of two hops, ``None`` for exact.

        Args:
            shards: Whether it belongs to a reduce-scatter, or to an all-reduce.
        """
        coded = shards and self.gradients in ("int8", "e4m3", "int4")
        return (
            self.wire("int8")
            if self.inside_node == "int8" or (self.inside_node == "auto" and coded)
            else None
        )

    def why_exact(self, shape: Sequence[int], itemsize: int) -> str | None:
        """Why a parameter of this shape stays uncompressed among others that do not; ``None`` if it does not.

        Vectors (norms, biases) and small parameters are few bytes, and their values lie far from their neighbours'.
        """
        if sum(size > 1 for size in shape) < 2:
            return "not a matrix"
        if math.prod(shape) * itemsize < self.min_bytes:
            return f"smaller than min_bytes ({self.min_bytes})"
        return None

    def wire(self, name: str) -> WireFormat | None:
        """The wire format called ``name``; ``None`` for ``none``."""
        if name == "none":
            return None
        return WireFormat(name=name, block_size=self.block_size)  # type: ignore[arg-type]
