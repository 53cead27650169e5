"""What an attached model carries: the switch, the counters, the residuals, and the report of what is compressed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compressed_group import Switch
from foundry_fp8.distributed.compression.config import KEY, CompressionConfig
from foundry_fp8.distributed.mesh import ranks_per_node, spans_nodes
from foundry_fp8.distributed.rounding import Noise
from foundry_fp8.distributed.traffic import Traffic
from foundry_fp8.distributed.two_hop import TwoHop, make_two_hop
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["Compression", "ReportRow", "Route"]


@dataclasses.dataclass(frozen=True)
class ReportRow:
    """One line of the report: what became of one message."""

    name: str
    what: str
    """``gradients`` or ``parameters``."""
    action: str
    """The format it travels as, or ``uncompressed``."""
    reason: str


@dataclasses.dataclass(frozen=True)
class Route:
    """How the messages of one process group travel."""

    why_not: str | None = None
    """Why they are not worth compressing; ``None`` where they are."""
    hop: TwoHop | None = None
    """The groups of two hops, where the group spans nodes with several ranks each."""

    def wire(self, wire: WireFormat | None) -> WireFormat | None:
        """``wire``, or ``None`` where nothing is compressed."""
        return None if self.why_not else wire


class Compression:
    """The compression of one model, shared by everything attached to it.

    Residuals are no state of a run: see :meth:`forget`.

    Attributes:
        config: What was asked for.
        traffic: Bytes and times.
        switch: Whether gradients are compressed now.
        rows: What travels how, and why.
        holders: Give the residuals that are in use, one for each that keeps some.
        noises: The seeds of every leg that rounds at random.
    """

    def __init__(self, config: CompressionConfig) -> None:
        self.config = config
        self.traffic = Traffic()
        self.switch = Switch(on=config.warmup == 0, min_bytes=config.min_bytes)
        self.rows: list[ReportRow] = []
        self.holders: list[Callable[[], Iterable[Tensor]]] = []
        self.noises: list[Noise] = []
        self._hops: dict[tuple[int, ...], TwoHop] = {}

    def start_batch(self, batch: int) -> None:
        """Say which batch comes next: warm-up, error sampling and the seeds of random rounding go by this number."""
        every = self.config.sample_interval
        self.switch.on = batch >= self.config.warmup
        self.traffic.sample = every > 0 and batch % every == 0 and self.switch.on
        for noise in self.noises:
            noise.start_batch(batch)

    def residuals(self) -> list[Tensor]:
        """The error feedback in use, float32: what quantising lost and the next step adds."""
        return [residual for held in self.holders for residual in held()]

    def forget(self) -> None:
        """Forget what quantising lost up to now. Call it on every rank wherever a checkpoint is taken.

        Residuals differ on every rank, a float32 gradient each, and a checkpoint that held them would hold a gradient a rank. A run that
        forgets them at a checkpoint goes on as the run that resumes from it, bit for bit and with any number of ranks; what
        one step's rounding lost is not made up for, once a checkpoint.
        """
        for residual in self.residuals():
            residual.zero_()

    def route(self, group: dist.ProcessGroup) -> Route:
        """How ``group`` is compressed, given ``scope``.

        Raises:
            ConfigError: ``scope: inter_node`` on a single node, or a group that two hops cannot serve.
        """
        per_node = ranks_per_node()
        several = dist.get_world_size() > per_node
        if self.config.scope == "inter_node" and not several:
            raise ConfigError(
                f"{KEY}.scope: inter_node, but all {per_node} ranks are on one node: nothing crosses nodes. "
                "Use scope: all to compress inside the node."
            )
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return Route("a group of one rank")
        if self.config.scope == "all" or not several:
            return Route()
        if not spans_nodes(ranks, per_node):
            return Route("all its ranks are on one node")
        in_node = sum(rank // per_node == ranks[0] // per_node for rank in ranks)
        if in_node == 1:
            return Route()
        if len(ranks) != dist.get_world_size():
            raise ConfigError(
                f"{KEY}.scope: {self.config.scope} needs two hops for a group of {len(ranks)} of the "
                f"{dist.get_world_size()} ranks. Shard inside nodes (hybrid_sharding.shard: node), or use scope: all."
            )
        key = tuple(ranks)
        if key not in self._hops:
            inside = self.config.wire("int8") if self.config.inside_node == "int8" else None
            self._hops[key] = make_two_hop(ranks, in_node, self.traffic, inside)
        return Route(hop=self._hops[key])

    def summary(self) -> str:
        """The report as text, alike rows counted together."""
        counts: dict[tuple[str, str, str], int] = {}
        for row in self.rows:
            counts[row.what, row.action, row.reason] = counts.get((row.what, row.action, row.reason), 0) + 1
        return "\n".join(
            f"compressed_communication: {count} x {what} as {action}: {reason}"
            for (what, action, reason), count in counts.items()
        )
