"""Two hops for groups that span nodes: full precision inside a node, codes across nodes.

    all_reduce        reduce-scatter inside -> quantised all-reduce of 1/L across -> all-gather inside
    reduce_scatter    reduce-scatter inside -> quantised reduce-scatter across

L ranks of a node send each byte across the network once instead of L times, and what crosses it may be as coarse as
4 bits. The hop inside a node is exact by default: it sends what it has, in its own dtype, and sums in float32.

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
from foundry_fp8.distributed.mesh import make_group
from foundry_fp8.distributed.rows import Row, share
from foundry_fp8.distributed.traffic import CountingGroup, Traffic
from foundry_fp8.distributed.wire import Noise
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["TwoHop", "make_two_hop", "own_numel", "reduce_scatter_two_hop", "two_hop_all_reduce"]

EXACT = WireFormat(name="fp32")


@dataclasses.dataclass(frozen=True)
class TwoHop:
    """The two groups that a rank is in.

    Attributes:
        inside: The ranks of this node, in order.
        across: The ranks with this rank's place in their node, in the order of the nodes.
        inside_wire: What travels inside a node; ``None`` for the tensor as it is.
    """

    inside: CountingGroup
    across: CountingGroup
    inside_wire: WireFormat | None = None

    @property
    def ranks(self) -> int:
        """Of both hops together."""
        return self.inside.size() * self.across.size()


def make_two_hop(
    ranks: Sequence[int], ranks_per_node: int, traffic: Traffic, inside_wire: WireFormat | None = None
) -> TwoHop:
    """Make the groups of a two-hop collective. Every one of ``ranks`` must call it, with the same arguments.

    Of ``ranks``, those of one node stand together.

    Raises:
        ConfigError: The ranks do not divide into nodes.
    """
    if len(ranks) % ranks_per_node:
        raise ConfigError(f"{len(ranks)} ranks do not divide into nodes of {ranks_per_node}.")
    node, place = divmod(list(ranks).index(dist.get_rank()), ranks_per_node)
    inside = make_group(ranks[node * ranks_per_node : (node + 1) * ranks_per_node])
    across = make_group(ranks[place::ranks_per_node])
    return TwoHop(CountingGroup(inside, traffic), CountingGroup(across, traffic), inside_wire)


def two_hop_all_reduce(
    tensor: Tensor,
    hop: TwoHop,
    wire: WireFormat,
    *,
    second_leg: WireFormat | None = None,
    rows: Sequence[Row] | None = None,
    mean: bool = True,
    residual: Tensor | None = None,
) -> Tensor:
    """Reduce ``tensor`` over both hops, in place; see :func:`collectives.all_reduce`.

    Inside a node the sum is taken in the order of the ranks, and not by the backend's own reduction, whose order may depend on an element's
    place in the tensor: what an element becomes depends on its block alone. It sends as many bytes as a ring would. ``rows`` are ordered
    place by place, and node by node within a place; ``residual`` is that of the hop across, float32 ``[own_numel(rows, hop)]``.
    """
    if rows is None:
        rows = share(Row.of(tensor.numel()), hop.ranks, wire.block_size)
    by_place = _by_place(rows, hop)
    sections = [_joined(place, wire.block_size) for place in by_place]
    if hop.inside_wire is None:
        part = _sum_in_order(tensor, hop.inside, [section.numel for section in sections], mean)
    else:
        part = collectives.reduce_scatter(tensor, hop.inside, hop.inside_wire, rows=sections, mean=mean)
    own = by_place[hop.inside.rank()]
    collectives.all_reduce(
        part, hop.across, wire, second_leg=second_leg, rows=own, mean=mean, residual=residual
    )
    # Lossless: the parts are the same on all nodes.
    return tensor.copy_(collectives.all_gather(part, hop.inside, EXACT, rows=sections))


def own_numel(rows: Sequence[Row], hop: TwoHop) -> int:
    """Elements that cross the network from this rank: those of its place in the node."""
    return sum(row.numel for row in _by_place(rows, hop)[hop.inside.rank()])


def reduce_scatter_two_hop(
    input: Tensor,
    hop: TwoHop,
    wire: WireFormat,
    *,
    rows: Sequence[Row] | None = None,
    mean: bool = True,
    noise: Noise | None = None,
) -> Tensor:
    """Reduce ``input`` over both hops and keep this rank's part; ranks are ordered node by node.

    ``input`` holds ``n`` elements for each of ``rows``.

    Returns:
        float32 ``[n]``.
    """
    nodes, places = hop.across.size(), hop.inside.size()
    rows = [Row.of(input.numel() // hop.ranks)] * hop.ranks if rows is None else rows
    # [node, place, n] -> [place, node, n]: what goes to one place of this node first.
    by_place = input.view(nodes, places, -1).transpose(0, 1).reshape(-1)
    rows_by_place = [rows[place::places] for place in range(places)]
    if hop.inside_wire is not None and places > 1:
        sections = [_joined(place, wire.block_size) for place in rows_by_place]
        part = collectives.reduce_scatter(by_place, hop.inside, hop.inside_wire, rows=sections, mean=mean)
    else:
        part = _sum_in_order(by_place, hop.inside, [input.numel() // places] * places, mean)
    own = rows_by_place[hop.inside.rank()]
    return collectives.reduce_scatter(part, hop.across, wire, rows=own, mean=mean, noise=noise)


def _by_place(rows: Sequence[Row], hop: TwoHop) -> list[list[Row]]:
    nodes = hop.across.size()
    return [list(rows[first : first + nodes]) for first in range(0, len(rows), nodes)]


def _joined(rows: Sequence[Row], block_size: int) -> Row:
    return Row.join([section for row in rows for section in row.sections], block_size)


def _sum_in_order(input: Tensor, group: CountingGroup, splits: list[int], mean: bool) -> Tensor:
    """Send each rank its part of ``input`` in the dtype it has, and sum what arrives in float32, in the order of the ranks."""
    ranks, own, size = group.size(), splits[group.rank()], input.element_size()
    received = input.new_empty(ranks * own)
    # As bytes: gloo does not know every dtype.
    group.alltoall_base(
        received.view(torch.uint8), input.view(torch.uint8), [own * size] * ranks, [n * size for n in splits]
    ).wait()
    first, *others = received.view(ranks, own)
    total = first.float()
    for other in others:
        total += other
    return total.div_(ranks) if mean else total
