"""Constants of a network from the logs of nccl-tests, in place of assumed ones."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy

from foundry_fp8.config import ConfigError
from foundry_fp8.planning.communication.machines import Network

__all__ = ["Measured", "read_log", "with_logs"]

KEY = "--nccl-tests"
SMALLEST = 1 << 20
"""Bytes from which on NCCL takes the protocol that FSDP's messages take."""
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device", re.M)
# size count type redop root, then time (us), algbw and busbw (GB/s) out of place.
_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+[a-z]\w*\s+\S+\s+-?\d+\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s", re.M)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One log: seconds of a collective are ``seconds + bytes / bus`` times what its ring sends."""

    ranks: int
    nodes: int
    shots: int
    """2 for all-reduce, 1 for all-gather and reduce-scatter."""
    seconds: float
    bus: float
    """Bytes/s."""


def read_log(path: Path) -> Measured:
    """Fit a latency and a bus bandwidth to the log of ``all_gather_perf``, ``reduce_scatter_perf`` or ``all_reduce_perf``.

    Times are fitted in relative least squares over messages of at least 1 MiB.

    Raises:
        ConfigError: It is no such log, or has fewer than three sizes from 1 MiB on.
    """
    text = path.read_text(errors="replace")
    places = dict(_RANK.findall(text))
    rows = [
        (int(size), float(us) * 1e-6, float(alg), float(bus)) for size, us, alg, bus in _ROW.findall(text)
    ]
    rows = [row for row in rows if row[0] >= SMALLEST and row[1] > 0 and row[2] > 0]
    if len(places) < 2 or len(rows) < 3:
        raise ConfigError(
            f"{KEY}: {path.name} has {len(places)} ranks and {len(rows)} messages of at least 1 MiB; a log of nccl-tests with 2 ranks "
            "or more and three such sizes is needed (-b 1M -e 1G -f 2)."
        )
    ranks, nodes = len(places), len(set(places.values()))
    share = rows[-1][3] / rows[-1][2]  # bus over algorithm bandwidth: (N - 1) / N, twice that for all-reduce
    shots = round(share * ranks / (ranks - 1))
    if shots not in (1, 2) or abs(share * ranks / (ranks - 1) - shots) > 0.05:
        raise ConfigError(
            f"{KEY}: {path.name} is of no all_gather, reduce_scatter or all_reduce. Give the log of one of these."
        )
    sizes = numpy.array([row[0] for row in rows], dtype=float)
    times = numpy.array([row[1] for row in rows])
    slope, start = numpy.polyfit(sizes, times, 1, w=1 / times)
    return Measured(
        ranks=ranks,
        nodes=nodes,
        shots=shots,
        seconds=max(0.0, float(start)),
        bus=shots * (ranks - 1) / ranks / float(slope),
    )


def with_logs(network: Network, paths: list[Path]) -> Network:
    """``network`` with what was measured: logs of one node give what is inside, logs of several what is across.

    Raises:
        ConfigError: A log cannot be used, or is of other nodes than the network's.
    """
    logs = [(path, read_log(path)) for path in paths]
    for path, log in sorted(logs, key=lambda one: one[1].nodes):
        per_node = log.ranks // log.nodes
        if log.nodes > 1 and per_node != network.gpus_per_node:
            raise ConfigError(
                f"{KEY}: {path.name} has {per_node} ranks on a node, the network {network.gpus_per_node}. Choose another --network, "
                f"or --set gpus_per_node={per_node}."
            )
        steps, crossing = log.ranks - 1, log.nodes - 1
        ring = max(0.0, log.seconds - network.base_seconds) / log.shots
        if log.nodes == 1:
            network = dataclasses.replace(network, inside_bus=log.bus, inside_seconds=ring / steps)
        else:
            ring = max(0.0, ring - (steps - crossing) * network.inside_seconds)
            network = dataclasses.replace(network, across_bus=log.bus, across_seconds=ring / crossing)
    measured = ", ".join(path.name for path in paths)
    return (
        dataclasses.replace(network, source=f"{network.source}; measured: {measured}") if paths else network
    )
