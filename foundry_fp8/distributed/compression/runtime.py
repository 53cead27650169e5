"""What an attached model carries: the switch, the counters, the residuals, and the report of what is compressed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_fp8.distributed.compressed_group import WAYS, Switch, Way
from foundry_fp8.distributed.compression.adapt import Adaptation
from foundry_fp8.distributed.compression.config import CompressionConfig
from foundry_fp8.distributed.compression.routing import Path, path_of
from foundry_fp8.distributed.mesh import ranks_per_node
from foundry_fp8.distributed.traffic import Traffic
from foundry_fp8.distributed.two_hop import TwoHop, make_two_hop
from foundry_fp8.distributed.wire import Noise
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["Compression", "ReportRow", "Route"]


@dataclasses.dataclass(frozen=True)
class ReportRow:
    """One line of the report: what became of one message."""

    name: str
    what: str
    """``gradients``, ``parameters`` or ``activations``."""
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
        adaptation: What measures and decides how gradients travel; ``None`` where the format is kept.
        device: Of the parameters.
    """

    def __init__(self, config: CompressionConfig) -> None:
        self.config = config
        self.traffic = Traffic()
        self.switch = Switch(on=config.warmup == 0, min_bytes=config.min_bytes)
        self.rows: list[ReportRow] = []
        self.holders: list[Callable[[], Iterable[Tensor]]] = []
        self.noises: list[Noise] = []
        coded = config.gradients not in ("none", "bf16")
        self.adaptation = (
            Adaptation(config.gradients, config.warmup, self.traffic) if config.adapt and coded else None
        )
        self.device = torch.device("cpu")
        self._hops: dict[tuple[int, ...], TwoHop] = {}

    def start_batch(self, batch: int) -> None:
        """Say which batch comes next: warm-up, error sampling, the seeds of random rounding and what ``adapt`` measures go by this number."""
        if self.adaptation is not None and dist.is_initialized():
            self.switch.way, decided = self.adaptation.start_batch(batch, self.device)
            if decided and self.switch.way != "coded":
                self.forget()
        every = self.config.sample_interval
        self.switch.on = batch >= self.config.warmup
        self.traffic.sample = every > 0 and batch % every == 0 and self.switch.on
        for noise in self.noises:
            noise.start_batch(batch)

    @property
    def way(self) -> Way:
        """What ``adapt`` decided, for a checkpoint; ``coded`` before it has, and where it is off."""
        return "coded" if self.adaptation is None else self.adaptation.way

    def resume(self, way: object) -> None:
        """Go on with a checkpoint's :attr:`way`; without effect where ``adapt`` is off, and for a checkpoint that has none."""
        if self.adaptation is not None and way in WAYS:
            self.adaptation.way = way

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Gradients travel uncompressed and nothing is counted: error feedback, random rounding and counters stay as they are."""
        switch, traffic = self.switch, self.traffic
        before = switch.on, switch.reductions, traffic.sample
        switch.on, traffic.sample, traffic.paused = False, False, True
        try:
            yield
        finally:
            switch.on, switch.reductions, traffic.sample = before
            traffic.paused = False

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

    def path(self, group: dist.ProcessGroup) -> Path:
        """Which hops the messages of ``group`` take, given ``scope``.

        Raises:
            ConfigError: See :func:`path_of`.
        """
        ranks = dist.get_process_group_ranks(group)
        return path_of(ranks, world=dist.get_world_size(), per_node=ranks_per_node(), scope=self.config.scope)

    def route(self, group: dist.ProcessGroup, *, shards: bool) -> Route:
        """How gradients are reduced in ``group``; makes the groups of two hops where they are needed.

        Args:
            group: The ranks that reduce.
            shards: Whether each keeps its part (a reduce-scatter) or all have all (an all-reduce).

        Raises:
            ConfigError: See :func:`path_of`.
        """
        path = self.path(group)
        if path.inside == 1:
            return Route(path.why_not)
        inside = self.config.inside_wire(shards=shards)
        ranks = dist.get_process_group_ranks(group)
        key = (shards, *ranks)
        if key not in self._hops:
            self._hops[key] = make_two_hop(ranks, path.inside, self.traffic, inside)
        return Route(hop=self._hops[key])

    def note(self, name: str, what: str, fmt: str, how: str, why_not: str | None) -> None:
        """Add a line to the report: the message travels as ``fmt``, or uncompressed where something says ``why_not``."""
        action = "uncompressed" if why_not else fmt
        self.rows.append(ReportRow(name, what, action, why_not or how))

    def summary(self) -> str:
        """The report as text, alike rows counted together."""
        counts = Counter((row.what, row.action, row.reason) for row in self.rows)
        lines = [
            f"compressed_communication: {count} x {what} as {action}: {reason}"
            for (what, action, reason), count in counts.items()
        ]
        if self.adaptation is not None and self.adaptation.verdict:
            lines.append(self.adaptation.verdict)
        return "\n".join(lines)
