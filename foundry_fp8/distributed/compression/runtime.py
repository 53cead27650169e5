"""What an attached model carries: the switch, the counters, the residuals, and the report of what is compressed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compressed_group import Switch
from foundry_fp8.distributed.compression.config import KEY, CompressionConfig
from foundry_fp8.distributed.mesh import ranks_per_node, spans_nodes
from foundry_fp8.distributed.traffic import Traffic
from foundry_fp8.distributed.two_hop import TwoHop, default_splits, make_two_hop, own_numel
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["Compression", "Route", "Row"]


@dataclasses.dataclass(frozen=True)
class Row:
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

    compressed: bool
    """Whether they are worth compressing: not where they stay inside a node and ``scope`` is about what crosses."""
    hop: TwoHop | None = None
    """The groups of two hops, where the group spans nodes with several ranks each."""

    def wire(self, wire: WireFormat | None) -> WireFormat | None:
        """``wire``, or ``None`` where nothing is compressed."""
        return wire if self.compressed else None

    def residual_numel(self, numel: int, wire: WireFormat) -> int:
        """Elements of the residual of an all-reduce of ``numel`` elements."""
        return numel if self.hop is None else own_numel(default_splits(numel, self.hop, wire), self.hop)


class Compression:
    """The compression of one model, shared by everything attached to it.

    Attributes:
        config: What was asked for.
        traffic: Bytes and times.
        switch: Whether gradients are compressed now.
        rows: What travels how, and why.
        residuals: Error feedback by name: of a parameter under DDP, of an FSDP unit on a replicate leg.
        loaded: Residuals from a checkpoint that no leg has taken yet.
        calls: How often a gradient reduction of ours ran.
        replicates: Whether anything attached replicates, and so may have residuals.
        before_save: Called before residuals are read, to bring them up to date.
        after_load: Called after residuals were replaced.
    """

    def __init__(self, config: CompressionConfig) -> None:
        self.config = config
        self.traffic = Traffic()
        self.switch = Switch(on=config.warmup == 0, min_bytes=config.min_bytes)
        self.rows: list[Row] = []
        self.residuals: dict[str, Tensor] = {}
        self.loaded: dict[str, Tensor] = {}
        self.replicates = True
        self.calls = 0
        self.before_save: list[Callable[[], None]] = []
        self.after_load: list[Callable[[], None]] = []
        self._hops: dict[tuple[int, ...], TwoHop] = {}

    def start_batch(self, batch: int) -> None:
        """Say which batch comes next: warm-up ends, and the quantisation error is sampled, by this number."""
        every = self.config.sample_interval
        self.switch.on = batch >= self.config.warmup
        self.traffic.sample = every > 0 and batch % every == 0 and self.switch.on

    def residual(self, name: str, numel: int, device: torch.device) -> Tensor:
        """The residual called ``name``: zeros, or what a checkpoint held.

        Raises:
            RuntimeError: The checkpoint's has another size.
        """
        if name not in self.residuals:
            loaded = self.loaded.pop(name, None)
            if loaded is not None and loaded.numel() != numel:
                raise RuntimeError(
                    f"{KEY}: the checkpoint's error-feedback residual {name} has {loaded.numel()} elements and this "
                    f"run needs {numel}: the model or the sharding changed. Exclude the algorithm's state from the "
                    "load (load_ignore_keys: ['state/algorithms/*']) to start with no residual."
                )
            fresh = torch.zeros(numel, dtype=torch.float32, device=device)
            self.residuals[name] = fresh if loaded is None else fresh.copy_(loaded.view(-1))
        return self.residuals[name]

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
        if self.config.scope == "all" or not several:
            return Route(True)
        ranks = dist.get_process_group_ranks(group)
        if not spans_nodes(ranks, per_node):
            return Route(False)
        in_node = sum(rank // per_node == ranks[0] // per_node for rank in ranks)
        if in_node == 1:
            return Route(True)
        if len(ranks) != dist.get_world_size():
            raise ConfigError(
                f"{KEY}.scope: {self.config.scope} needs two hops for a group of {len(ranks)} of the "
                f"{dist.get_world_size()} ranks. Shard inside nodes (hybrid_sharding.shard: node), or use scope: all."
            )
        key = tuple(ranks)
        if key not in self._hops:
            inside = self.config.wire("int8") if self.config.inside_node == "int8" else None
            self._hops[key] = make_two_hop(ranks, in_node, self.traffic, inside)
        return Route(True, self._hops[key])

    def summary(self) -> str:
        """The report as text, alike rows counted together."""
        counts: dict[tuple[str, str, str], int] = {}
        for row in self.rows:
            counts[row.what, row.action, row.reason] = counts.get((row.what, row.action, row.reason), 0) + 1
        return "\n".join(
            f"compressed_communication: {count} x {what} as {action}: {reason}"
            for (what, action, reason), count in counts.items()
        )

    def state_dict(self) -> dict[str, Any]:
        """The residuals of all ranks, on rank 0, so that a resume is exact. Every rank must call it.

        Composer writes an algorithm's state from rank 0 alone, in sharded checkpoints too, and residuals differ on every
        rank: they are collected there. That is one float32 gradient (or gradient shard, under HSDP) a rank.

        Returns:
            ``{"world": ranks, "residuals": {"<name>@<rank>": float32, flat}}``; without the others' on other ranks.
        """
        for refresh in self.before_save:
            refresh()
        mine = {f"{name}@{dist.get_rank()}": t.cpu() for name, t in {**self.loaded, **self.residuals}.items()}
        boxes: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        if self.config.feeds_back and self.replicates:
            dist.gather_object(mine, boxes)
        residuals = {key: value for box in boxes or [] for key, value in (box or {}).items()}
        return {"world": dist.get_world_size(), "residuals": residuals}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's residuals; they are handed out as legs attach."""
        residuals, mine = state.get("residuals", {}), f"@{dist.get_rank()}"
        if residuals and state["world"] != dist.get_world_size():
            raise RuntimeError(
                f"{KEY}: the checkpoint holds error feedback of {state['world']} ranks and this run has "
                f"{dist.get_world_size()}. It cannot be handed out; exclude the algorithm's state from the load "
                "(load_ignore_keys: ['state/algorithms/*'])."
            )
        for key, value in residuals.items():
            name = key.removesuffix(mine)
            if name == key:
                continue
            if name in self.residuals:
                self.residuals[name].copy_(value.view(-1))
            else:
                self.loaded[name] = value.clone()
        for refresh in self.after_load:
            refresh()
