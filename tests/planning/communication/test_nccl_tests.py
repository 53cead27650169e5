"""Logs of nccl-tests, written here from known constants, give these constants back."""

import dataclasses

import pytest

from foundry_fp8.config import ConfigError
from foundry_fp8.planning.communication.legs import collective_seconds
from foundry_fp8.planning.communication.machines import NETWORKS
from foundry_fp8.planning.communication.nccl_tests import read_log, with_logs

TRUE = dataclasses.replace(
    NETWORKS["h100-3200g"], inside_bus=3.1e11, across_bus=2.2e11, inside_seconds=5e-6, across_seconds=3e-5
)


def write(path, ranks, per_node, shots, largest=2**33, times=None):
    """A log of ``times`` by bytes, by default of what TRUE takes."""
    head = "# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor)\n#\n# Using devices\n"
    for rank in range(ranks):
        head += f"#  Rank {rank:2d} Group  0 Pid {6000 + rank} on host-{rank // per_node} device {rank % per_node:2d} [0000:04:00] H100\n"
    head += "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
    if times is None:
        times = {2**k: collective_seconds(2**k, ranks, TRUE, shots=shots) for k in range(3, 34)}
        times |= {
            size: seconds / 3 for size, seconds in times.items() if size < 2**20
        }  # another protocol: must not be fitted
    for size, seconds in times.items():
        if size > largest:
            break
        alg = size / seconds / 1e9
        bus = alg * shots * (ranks - 1) / ranks
        row = f"{seconds * 1e6:9.3f} {alg:9.4f} {bus:9.4f}      0"
        head += f"{size:12d} {size // 4:12d}     float     sum      -1 {row} {row}\n"
    path.write_text(head + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 123.4\n")
    return path


@pytest.mark.parametrize("shots", [1, 2])
def test_constants_come_back(tmp_path, shots):
    inside, across = write(tmp_path / "one.log", 8, 8, shots), write(tmp_path / "four.log", 32, 8, shots)
    found = with_logs(NETWORKS["h100-3200g"], [across, inside])
    for name in ("inside_bus", "across_bus", "inside_seconds", "across_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    assert "measured: four.log, one.log" in found.source
    log = read_log(across)
    assert (log.ranks, log.nodes, log.shots) == (32, 4, shots)


def test_what_is_no_log_is_refused(tmp_path):
    empty = tmp_path / "empty.log"
    empty.write_text("hello\n")
    with pytest.raises(ConfigError, match="0 ranks and 0 messages"):
        read_log(empty)
    short = write(tmp_path / "short.log", 8, 8, 1, largest=2**20)
    with pytest.raises(ConfigError, match="three such sizes"):
        read_log(short)
    four = write(tmp_path / "quad.log", 8, 4, 1)
    with pytest.raises(ConfigError, match="4 ranks on a node, the network 8"):
        with_logs(NETWORKS["h100-3200g"], [four])


def test_every_log_counts(tmp_path):
    """Logs of two and of four nodes that take different times: what is nearest to both lies between."""
    two = write(tmp_path / "two.log", 16, 8, 1)
    seconds = {2**k: 1.3 * collective_seconds(2**k, 32, TRUE) for k in range(20, 32)}
    four = write(tmp_path / "four.log", 32, 8, 1, times=seconds)
    start = dataclasses.replace(TRUE, across_bus=1e11, across_seconds=1e-3)
    buses = [with_logs(start, paths).across_bus for paths in ([two], [four, two], [two, four], [four])]
    assert buses[0] == pytest.approx(2.2e11, rel=0.02) and buses[3] == pytest.approx(2.2e11 / 1.3, rel=0.02)
    assert buses[1] == pytest.approx(buses[2]) and 1.05 * buses[3] < buses[1] < 0.95 * buses[0]
