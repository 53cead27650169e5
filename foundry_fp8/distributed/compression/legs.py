"""The two legs of an FSDP unit: the reduce-scatter among the ranks that shard it, and the all-reduce across its replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from foundry_fp8.config import Clash
from foundry_fp8.distributed.attendance import check_all_to_all
from foundry_fp8.distributed.compressed_group import Leg
from foundry_fp8.distributed.compression.config import KEY, CompressionConfig
from foundry_fp8.distributed.compression.runtime import Compression, Route
from foundry_fp8.distributed.rows import Row, share
from foundry_fp8.distributed.wire import Noise
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["LEG_CLASHES", "Legs", "replicate_leg", "shard_leg"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Legs:
    """What the collectives of a wrapper (FSDP, HSDP, DDP) are, and what is asked of them."""

    config: CompressionConfig
    shards: bool  # gradients are reduce-scattered
    replicates: bool  # they are all-reduced
    ddp: bool = False
    reshards_to_fewer: bool = False  # FSDP2's reshard_after_forward: <int>
    drops_replication: bool = False  # FSDP1's hybrid strategy over shard groups of one rank


LEG_CLASHES = (
    Clash("`compressed_communication.gradients: int4`, nothing replicates",
          f"{KEY}.gradients: int4 is for legs that replicate, and this FSDP only shards. Use int8 or e4m3, or add "
          "algorithms.hybrid_sharding.", lambda legs: not legs.replicates and legs.config.gradients == "int4"),
    Clash("`compressed_communication.error_feedback: true`, nothing replicates",
          f"{KEY}.error_feedback: true would keep a whole gradient on every rank where FSDP only shards. Use auto (and rounding: "
          "stochastic), or add algorithms.hybrid_sharding: its replicate leg keeps a shard only.",
          lambda legs: not legs.replicates and legs.config.error_feedback is True),
    Clash("`compressed_communication.rounding: stochastic`, nothing is sharded",
          f"{KEY}.rounding: stochastic is for legs that shard, and nothing is sharded here. Use nearest: error_feedback carries what "
          "is lost to the next step.", lambda legs: not legs.shards and legs.config.rounding == "stochastic"),
    Clash("`compressed_communication.parameters`, no `fsdp_config`",
          f"{KEY}.parameters: {{run.config.parameters}}, but DDP gathers no parameters. Use parameters: none, or FSDP.",
          lambda legs: legs.ddp and legs.config.parameters != "none"),
    Clash("`compressed_communication.parameters`, FSDP2's `reshard_after_forward: <int>`",
          f"{KEY}.parameters: {{run.config.parameters}} and FSDP2's reshard_after_forward: <int> exclude each other "
          "(torch raises NotImplementedError for extensions there). Set reshard_after_forward to true or false.",
          lambda legs: legs.reshards_to_fewer and legs.config.parameters != "none"),
    Clash("`compressed_communication`, FSDP1's `HYBRID_SHARD` over shard groups of one rank",
          f"{KEY}: FSDP1 was given a hybrid strategy over shard groups of one rank. torch runs that as NO_SHARD over the one rank, and "
          "its gradients are never reduced. Use sharding_strategy: NO_SHARD, or algorithms.hybrid_sharding, which does.",
          lambda legs: legs.drops_replication),
)  # fmt: skip
"""What the legs of a wrapper cannot do."""


def shard_leg(
    compression: Compression,
    group: dist.ProcessGroup,
    rows: Callable[[int], Sequence[Row] | None],
    *,
    name: str,
    device: torch.device,
    nbytes: int,
) -> Leg | None:
    """The compressed reduce-scatter of an FSDP unit, or ``None`` if it stays uncompressed; adds a line to the report.

    ``rows`` gives, of a tensor's number of elements, the row that each rank receives; ``None`` if that is not known.
    """
    config, route = compression.config, compression.route(group, shards=True)
    wire = route.wire(config.shard_wire)
    _report(compression, name, "reduce-scatter", wire, route, nbytes)
    if wire is None:
        return None
    check_all_to_all(group, device)
    leg = Leg(wire, rows, hop=route.hop)
    if config.rounding == "stochastic":
        leg.noise = Noise(name, dist.get_rank())
        compression.noises.append(leg.noise)
    return leg


def replicate_leg(
    compression: Compression,
    group: dist.ProcessGroup,
    row: Callable[[int], Row | None],
    *,
    name: str,
    device: torch.device,
    numel: int,
    nbytes: int,
) -> Leg | None:
    """The compressed all-reduce of an FSDP unit or its shard, or ``None`` if it stays uncompressed; adds a line to the report.

    ``row`` gives, of a tensor's number of elements, the row that this rank reduces; ``numel`` is the number that it usually has, and the
    residual's.
    """
    config, route = compression.config, compression.route(group, shards=False)
    wire = route.wire(config.wire(config.gradients))
    _report(compression, name, "all-reduce across replicas", wire, route, nbytes)
    if wire is None:
        return None
    check_all_to_all(group, device)
    parts = group.size() if route.hop is None else route.hop.ranks

    def rows(count: int) -> Sequence[Row] | None:
        known = row(count)
        return None if known is None else share(known, parts, config.block_size)

    leg = Leg(
        wire,
        rows,
        second_leg=config.second_leg_wire,
        hop=route.hop,
        uses_error_feedback=config.uses_error_feedback,
    )
    leg.residual(numel, device)  # allocated now, so that memory does not grow when the warm-up ends
    compression.holders.append(leg.held)
    return leg


def _report(
    compression: Compression, name: str, leg: str, wire: WireFormat | None, route: Route, nbytes: int
) -> None:
    config = compression.config
    why_not = "gradients: none" if config.gradients == "none" else route.why_not
    if not why_not and nbytes < config.min_bytes:
        why_not = f"smaller than min_bytes ({config.min_bytes})"
    how = f"FSDP {leg}, vectors and small parameters exactly"
    fmt = "uncompressed" if wire is None else wire.name
    compression.note(name, "gradients", fmt, how, why_not and f"FSDP {leg}: {why_not}")
