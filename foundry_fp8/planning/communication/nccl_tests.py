"""Constants of a network from the logs of nccl-tests, in place of assumed ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy

from foundry_fp8.config import ConfigError
from foundry_fp8.planning.communication.machines import Network

__all__ = ["Measured", "fitted", "read_log", "with_logs"]

KEY = "--nccl-tests"
SMALLEST = 1 << 20
"""Bytes of the smallest message that is fitted: below, NCCL takes protocols of its own, and steps send more."""
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device", re.M)
# size count type redop root, then time (us), algbw and busbw (GB/s) out of place.
_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+[a-z]\w*\s+\S+\s+-?\d+\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s", re.M)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What one log says of one collective."""

    ranks: int
    nodes: int
    shots: int
    """2 for all-reduce, 1 for all-gather and reduce-scatter."""
    seconds: Mapping[int, float]
    """By bytes of the whole message."""


def read_log(path: Path) -> Measured:
    """The log of ``all_gather_perf``, ``reduce_scatter_perf`` or ``all_reduce_perf``: its messages of at least 1 MiB.

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
    return Measured(ranks=ranks, nodes=nodes, shots=shots, seconds={row[0]: row[1] for row in rows})


def with_logs(network: Network, paths: list[Path]) -> Network:
    """``network`` with what was measured: logs of one node give what is inside, logs of several what is across.

    Raises:
        ConfigError: A log cannot be used, or is of other nodes than the network's.
    """
    logs = [(path, read_log(path)) for path in paths]
    for path, log in logs:
        per_node = log.ranks // log.nodes
        if log.nodes > 1 and per_node != network.gpus_per_node:
            raise ConfigError(
                f"{KEY}: {path.name} has {per_node} ranks on a node, the network {network.gpus_per_node}. Choose another --network, "
                f"or --set gpus_per_node={per_node}."
            )
    network = fitted(network, [log for _, log in logs])
    measured = ", ".join(path.name for path in paths)
    return (
        dataclasses.replace(network, source=f"{network.source}; measured: {measured}") if paths else network
    )


def fitted(network: Network, logs: Sequence[Measured]) -> Network:
    """``network`` with the bandwidth and latency at which :func:`~foundry_fp8.planning.communication.legs.collective_seconds` is nearest to
    ``logs``: in relative least squares over all sizes of all logs of one node, then over those of several. Every size counts alike, because
    steps send any; ``p5-efa``'s constants are made by this.
    """
    inside = [log for log in logs if log.nodes == 1]
    if inside:
        bus, seconds = _fit(network, inside)
        network = dataclasses.replace(network, inside_bus=bus, inside_seconds=seconds)
    across = [log for log in logs if log.nodes > 1]
    if across:
        bus, seconds = _fit(network, across)
        network = dataclasses.replace(network, across_bus=bus, across_seconds=seconds)
    return network


def _fit(network: Network, logs: Sequence[Measured]) -> tuple[float, float]:
    """Bytes/s of the ring, and seconds of one of those of its steps whose latency is asked for."""
    rows, rest = [], []
    for log in logs:
        steps, crossing = log.ranks - 1, log.nodes - 1
        asked = crossing or steps
        known = network.base_seconds + log.shots * (steps - asked) * network.inside_seconds
        for nbytes, seconds in log.seconds.items():
            rows.append((log.shots * nbytes * steps / log.ranks / seconds, log.shots * asked / seconds))
            rest.append((seconds - known) / seconds)
    (slope, latency), *_ = numpy.linalg.lstsq(numpy.array(rows), numpy.array(rest), rcond=None)
    # Where it is less than the constants alone say: what they say too much is no reason for another bandwidth.
    return 1 / float(slope), max(0.0, float(latency))
