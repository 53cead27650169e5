"""Seconds of single collectives against sums done by hand, and the bytes of compressed ones against training's own count."""

import pytest

from foundry_fp8.distributed.compression.config import CompressionConfig
from foundry_fp8.distributed.compression.routing import path_of
from foundry_fp8.gpus import GPUS
from foundry_fp8.numerics.wire_format import WireFormat
from foundry_fp8.planning.communication.legs import (
    Wires,
    all_to_all_seconds,
    bytes_per_element,
    collective_seconds,
)
from foundry_fp8.planning.communication.machines import NETWORKS

H100, EFA = GPUS["h100"], NETWORKS["h100-3200g"]
HBM = 0.75 * 3.35e12


def test_a_ring_all_gather_is_its_latency_and_its_bytes():
    # 64 ranks on 8 nodes: 63 steps, 7 of them across nodes.
    wanted = 8.4e-6 + 56 * 3.4e-6 + 7 * 14e-6 + 1e9 / 340e9 * 63 / 64
    assert collective_seconds(1e9, 64, EFA) == pytest.approx(wanted, rel=1e-9)
    inside = 8.4e-6 + 7 * 3.4e-6 + 1e9 / 360e9 * 7 / 8
    assert collective_seconds(1e9, 8, EFA) == pytest.approx(inside, rel=1e-9)
    assert collective_seconds(1e9, 1, EFA) == 0.0


def test_replicas_of_shards_cross_a_node_in_every_step_and_share_its_network():
    # 8 GPUs of a node each reduce their shard with the same GPU of 15 other nodes, at once.
    wanted = 8.4e-6 + 15 * 14e-6 + 1e8 / (340e9 / 8) * 15 / 16
    assert collective_seconds(1e8, 16, EFA, stride=8) == pytest.approx(wanted, rel=1e-9)


def test_a_direct_exchange_takes_more_across_nodes_than_a_ring():
    # 16 ranks on two nodes: each sends half of its bytes to the other node, 8 ranks through the node's network.
    wanted = 8.4e-6 + 14 * 3.4e-6 + 14e-6 + 8 * 1e9 / 2 / 340e9
    assert all_to_all_seconds(1e9, 16, EFA) == pytest.approx(wanted, rel=1e-9)
    assert all_to_all_seconds(1e9, 8, EFA) == collective_seconds(1e9, 8, EFA)
    assert all_to_all_seconds(1e9, 16, EFA, stride=8) == collective_seconds(1e9, 16, EFA, stride=8)


@pytest.mark.parametrize(("name", "wanted"), [("bf16", 2), ("int8", 1 + 4 / 128), ("int4", 0.5 + 4 / 128)])
def test_bytes_per_element_count_the_scales(name, wanted):
    assert bytes_per_element(WireFormat(name=name)) == wanted


def test_two_hops_sum_exactly_inside_and_send_codes_across():
    """2.08e8 BF16 gradients over 16 GPUs on two nodes: the bytes of each hop at each hop's speed, and three passes over memory."""
    config = CompressionConfig(inside_node="exact")
    path = path_of(range(16), world=16, per_node=8, scope=config.scope)
    assert path.inside == 8 and path.why_not is None
    numel = 2.08e8
    got = Wires(EFA, H100, config).reduce_scatter(numel, 2, 16, path)
    inside = 8.4e-6 + 7 * 3.4e-6 + 2 * numel * 7 / 8 / 360e9
    across = 8.4e-6 + 14e-6 + (1 + 4 / 128) * numel / 8 / 2 / (340e9 / 8)
    passes = (6 * numel + 6 * numel / 8) / HBM
    assert got == pytest.approx(inside + across + passes, rel=1e-9)
    coded = CompressionConfig()
    assert Wires(EFA, H100, coded).reduce_scatter(numel, 2, 16, path) < got


def test_the_second_half_of_an_all_reduce_travels_as_the_first_by_default():
    numel, ranks = 1e8, 8
    times = {}
    for second in ("auto", "int8", "bf16"):
        config = CompressionConfig(gradients="int8", second_leg=second)
        path = path_of(range(0, 64, 8), world=64, per_node=8, scope=config.scope)
        times[second] = Wires(EFA, H100, config).all_reduce(numel, 4, ranks, path, stride=8)
    assert times["auto"] == times["int8"] < times["bf16"]
    assert CompressionConfig(gradients="int4").second_leg_wire.name == "int8"
    assert CompressionConfig(gradients="bf16").second_leg_wire.name == "bf16"
    assert CompressionConfig(gradients="none", parameters="int8").second_leg_wire is None
