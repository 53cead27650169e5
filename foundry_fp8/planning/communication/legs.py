"""Seconds of one collective, plain or compressed, of one FSDP unit.

An alpha-beta model of rings as NCCL's own tuner has it (``src/graph/tuning.cc``):

    all-gather, reduce-scatter   base + (steps - inter) a_inside + inter a_across + bytes / bus (N - 1) / N
    all-reduce                   twice the steps and twice the bytes

with ``steps = N - 1``, of which ``inter = nodes - 1`` cross nodes. What it leaves out: tree all-reduce and PAT, which would lower latency at
scale. Compressed legs take the hops that training takes (:func:`foundry_fp8.distributed.compression.routing.path_of`).
"""

from __future__ import annotations

import dataclasses

from foundry_fp8.distributed.compression.config import CompressionConfig
from foundry_fp8.distributed.compression.routing import Path
from foundry_fp8.gpus import Gpu
from foundry_fp8.numerics.wire_format import WireFormat
from foundry_fp8.planning.communication.machines import Network

__all__ = ["Wires", "bytes_per_element", "collective_seconds"]


def bytes_per_element(wire: WireFormat) -> float:
    """Bytes on the wire for one element, scales included."""
    return wire.row_bytes(2**16) / 2**16


def collective_seconds(
    nbytes: float, ranks: int, network: Network, *, stride: int = 1, shots: int = 1
) -> float:
    """Seconds of one ring collective.

    Args:
        nbytes: The whole tensor on the wire (an all-gather's output, a reduce-scatter's input).
        ranks: Of the group.
        network: The constants.
        stride: Distance between neighbours of the group: 1 for consecutive ranks, G for the replicas of shards of G.
        shots: 1 for all-gather and reduce-scatter, 2 for all-reduce.
    """
    if ranks < 2:
        return 0.0
    span = ranks * stride
    nodes = max(1, -(-span // network.gpus_per_node)) if stride < network.gpus_per_node else ranks
    steps, crossing = ranks - 1, min(nodes, ranks) - 1
    # Groups with a stride share a node's NICs: each of the node's GPUs is in a group of its own.
    sharing = min(stride, network.gpus_per_node)
    bus = network.inside_bus if nodes == 1 else network.across_bus / sharing
    latency = (steps - crossing) * network.inside_seconds + crossing * network.across_seconds
    return network.base_seconds + shots * (latency + nbytes / bus * steps / ranks)


def all_to_all_seconds(nbytes: float, ranks: int, network: Network, *, stride: int = 1) -> float:
    """Seconds of an all-to-all whose inputs are ``nbytes`` on each rank: a ring's latency, but every byte goes to its rank itself.

    Of ``L`` ranks on a node each sends what other nodes need, so ``L`` times a ring's bytes leave the node.
    """
    together = max(1, min(ranks, network.gpus_per_node // stride))  # ranks of the group on one node
    if ranks < 2 or together == 1 or together == ranks:
        return collective_seconds(nbytes, ranks, network, stride=stride)
    latency = collective_seconds(0.0, ranks, network, stride=stride)
    leaving = network.gpus_per_node * nbytes * (ranks - together) / ranks
    return latency + max(nbytes / network.inside_bus, leaving / network.across_bus)


@dataclasses.dataclass(frozen=True)
class Wires:
    """The collectives of one FSDP unit, plain or compressed as ``config`` says; ``stride`` is that of :func:`collective_seconds`."""

    network: Network
    gpu: Gpu
    config: CompressionConfig | None = None

    def gather(
        self, numel: float, itemsize: float, ranks: int, wire: WireFormat | None, *, stride: int = 1
    ) -> float:
        """Seconds to gather ``numel`` parameters from ``ranks`` ranks; as codes from consecutive ones where ``wire`` is given."""
        if wire is None or ranks == 1:
            return collective_seconds(numel * itemsize, ranks, self.network, stride=stride)
        seconds = collective_seconds(numel * bytes_per_element(wire), ranks, self.network)
        coded_and_decoded = (numel / ranks + numel) * (itemsize + 1)
        return seconds + coded_and_decoded / self.gpu.hbm_bytes_per_second

    def reduce_scatter(
        self, numel: float, itemsize: float, ranks: int, path: Path, *, stride: int = 1
    ) -> float:
        """Seconds to reduce ``numel`` gradients among ``ranks`` ranks, each of which keeps its part."""
        config = self.config
        wire = None if config is None else config.shard_wire
        if wire is None or config is None or path.why_not:
            return collective_seconds(numel * itemsize, ranks, self.network, stride=stride)
        inside = config.inside_wire(shards=True)
        return self._coded_reduce_scatter(numel, itemsize, ranks, path.inside, wire, inside, 1)

    def all_reduce(self, numel: float, itemsize: float, ranks: int, path: Path, *, stride: int) -> float:
        """Seconds to reduce ``numel`` gradients among replicas, ``stride`` ranks apart."""
        config, network = self.config, self.network
        wire = None if config is None else config.wire(config.gradients)
        second = None if config is None else config.second_leg_wire
        if config is None or wire is None or second is None or path.why_not or ranks == 1:
            return collective_seconds(numel * itemsize, ranks, network, stride=stride, shots=2)
        inside = config.inside_wire(shards=False)
        seconds = self._coded_reduce_scatter(numel, itemsize, ranks, path.inside, wire, inside, stride)
        if path.inside > 1:
            # The parts of the node's ranks, as float32.
            seconds += collective_seconds(4 * numel, path.inside, network)
            numel, ranks, stride = numel / path.inside, ranks // path.inside, path.inside
        seconds += collective_seconds(numel * bytes_per_element(second), ranks, network, stride=stride)
        coded_and_decoded = (numel / ranks + numel) * 5
        return seconds + coded_and_decoded / self.gpu.hbm_bytes_per_second

    def _coded_reduce_scatter(
        self,
        numel: float,
        itemsize: float,
        ranks: int,
        places: int,
        wire: WireFormat,
        inside: WireFormat | None,
        stride: int,
    ) -> float:
        seconds = 0.0
        if places > 1:  # among the ranks of a node first: sent whole and summed, or coded
            sent = itemsize if inside is None else bytes_per_element(inside)
            seconds += all_to_all_seconds(numel * sent, places, self.network)
            # Ordered by place (read and written), and read for the sum; or read, coded, and the codes summed.
            moved = 3 * itemsize if inside is None else itemsize + 2
            seconds += numel * moved / self.gpu.hbm_bytes_per_second
            numel, itemsize, ranks, stride = numel / places, 4, ranks // places, places
        seconds += all_to_all_seconds(numel * bytes_per_element(wire), ranks, self.network, stride=stride)
        # Coded; the codes that arrive summed.
        return seconds + numel * (itemsize + 2) / self.gpu.hbm_bytes_per_second
