"""Two hops for groups that span nodes: full precision inside a node, codes across nodes.

    all_reduce        reduce-scatter inside -> quantised all-reduce of 1/L across -> all-gather inside
    reduce_scatter    reduce-scatter inside -> quantised reduce-scatter across

L ranks of a node send each byte across the network once instead of L times, and what crosses it may be as coarse as
4 bits. The hop inside a node stays in full precision by default: NVLink is faster than quantising.

Source: ZeRO++ (arXiv 2306.10209), qgZ; SDP4Bit (arXiv 2410.15526) for 8 bits inside and rotated 4 bits across.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed import collectives
from foundry_fp8.distributed.traffic import CountingGroup, Traffic, scatter_options
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = [
    "TwoHop",
    "default_splits",
    "make_two_hop",
    "own_numel",
    "reduce_scatter_two_hop",
    "two_hop_all_reduce",
]

EXACT = WireFormat(name="fp32")


@dataclasses.dataclass(frozen=True)
class TwoHop:
    """The two groups that a rank is in.

    Attributes:
        inside: The ranks of this node, in order.
        across: The ranks with this rank's place in their node, in the order of the nodes.
        inside_wire: What travels inside a node; ``None`` for full precision.
    """

    inside: CountingGroup
    across: CountingGroup
    inside_wire: WireFormat | None = None


def make_two_hop(
    ranks: Sequence[int], ranks_per_node: int, traffic: Traffic, inside_wire: WireFormat | None = None
) -> TwoHop:
    """Make the groups of a two-hop collective. Every rank of the job must call it, with the same arguments.

    Args:
        ranks: The global ranks to reduce over; those of one node stand together.
        ranks_per_node: How many of them a node holds.
        traffic: Where the bytes of both hops are counted.
        inside_wire: See :class:`TwoHop`.

    Raises:
        ConfigError: The ranks do not divide into nodes.
    """
    if len(ranks) % ranks_per_node:
        raise ConfigError(f"{len(ranks)} ranks do not divide into nodes of {ranks_per_node}.")
    nodes = [list(ranks[i : i + ranks_per_node]) for i in range(0, len(ranks), ranks_per_node)]
    inside, _ = dist.new_subgroups_by_enumeration(nodes)
    across, _ = dist.new_subgroups_by_enumeration([list(place) for place in zip(*nodes, strict=True)])
    return TwoHop(CountingGroup(inside, traffic), CountingGroup(across, traffic), inside_wire)


def two_hop_all_reduce(
    tensor: Tensor,
    hop: TwoHop,
    wire: WireFormat,
    *,
    second_leg: WireFormat | None = None,
    splits: Sequence[int] | None = None,
    mean: bool = True,
    residual: Tensor | None = None,
) -> Tensor:
    """Reduce ``tensor`` over both hops, in place; see :func:`collectives.all_reduce`.

    Inside a node the sum is taken in the order of the ranks, and not by the backend's own reduction, whose order may
    depend on an element's place in the tensor: what an element becomes depends on its block alone. It sends as many bytes
    as a ring would.

    Args:
        tensor: 1-D contiguous, floating.
        hop: The groups.
        wire: What crosses nodes in the first shot.
        second_leg: What crosses nodes in the second.
        splits: Elements that each rank sums, place by place and node by node within a place;
            :func:`collectives.shard_sizes` where ``None``.
        mean: Divide by the number of ranks of both hops.
        residual: Error feedback of the hop across, float32 ``[own_numel(splits, hop)]``.
    """
    if splits is None:
        splits = default_splits(tensor.numel(), hop, wire)
    by_place = _by_place(splits, hop)
    sections = [sum(nodes) for nodes in by_place]
    if hop.inside_wire is None:
        part = _sum_in_order(tensor.float(), hop.inside, sections, mean)
    else:
        part = collectives.reduce_scatter(tensor, hop.inside, hop.inside_wire, splits=sections, mean=mean)
    own = by_place[hop.inside.rank()]
    collectives.all_reduce(
        part, hop.across, wire, second_leg=second_leg, splits=own, mean=mean, residual=residual
    )
    # Lossless: the parts are the same on all nodes.
    return tensor.copy_(collectives.all_gather(part, hop.inside, EXACT, splits=sections))


def default_splits(numel: int, hop: TwoHop, wire: WireFormat) -> list[int]:
    """Elements that each rank of both hops sums where nothing else is asked for: whole blocks, as even as they go."""
    return collectives.shard_sizes(numel, hop.inside.size() * hop.across.size(), wire.block_size)


def own_numel(splits: Sequence[int], hop: TwoHop) -> int:
    """Elements that cross the network from this rank: those of its place in the node."""
    return sum(_by_place(splits, hop)[hop.inside.rank()])


def reduce_scatter_two_hop(input: Tensor, hop: TwoHop, wire: WireFormat, *, mean: bool = True) -> Tensor:
    """Reduce ``input`` over both hops and keep this rank's part; ranks are ordered node by node.

    Args:
        input: 1-D contiguous, ``W * n`` elements.
        hop: The groups.
        wire: What crosses nodes.
        mean: Divide by the number of ranks.

    Returns:
        float32 ``[n]``.
    """
    nodes, places = hop.across.size(), hop.inside.size()
    # [node, place, n] -> [place, node, n]: what goes to one place of this node first.
    by_place = input.view(nodes, places, -1).transpose(0, 1).reshape(-1).float()
    return collectives.reduce_scatter(_reduce_inside(by_place, hop, mean), hop.across, wire, mean=mean)


def _by_place(splits: Sequence[int], hop: TwoHop) -> list[list[int]]:
    nodes = hop.across.size()
    return [list(splits[first : first + nodes]) for first in range(0, len(splits), nodes)]


def _sum_in_order(input: Tensor, group: CountingGroup, splits: list[int], mean: bool) -> Tensor:
    ranks, own = group.size(), splits[group.rank()]
    received = input.new_empty(ranks * own)
    group.alltoall_base(received, input, [own] * ranks, splits).wait()
    total, *others = received.view(ranks, own)
    for other in others:
        total += other
    return total.div_(ranks) if mean else total


def _reduce_inside(input: Tensor, hop: TwoHop, mean: bool) -> Tensor:
    places = hop.inside.size()
    if hop.inside_wire is not None and places > 1:
        return collectives.reduce_scatter(input, hop.inside, hop.inside_wire, mean=mean)
    part = torch.empty(input.numel() // places, dtype=input.dtype, device=input.device)
    op = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    hop.inside._reduce_scatter_base(part, input, scatter_options(op)).wait()
    return part
