"""The slowest GPU against draws of the stated distribution."""

import dataclasses
from statistics import NormalDist

import numpy
import pytest

from foundry_fp8.planning.communication.machines import NETWORKS
from foundry_fp8.planning.communication.step import largest_of, slowest

P5 = NETWORKS["p5-efa"]


@pytest.mark.parametrize("count", [2, 8, 64, 1024])
def test_the_largest_of_many(count):
    """Against the integral of the largest's distribution, by the midpoint rule."""
    normal = NormalDist()
    grid = [-8 + (k + 0.5) * 0.002 for k in range(8000)]
    exact = sum(x * count * normal.cdf(x) ** (count - 1) * normal.pdf(x) * 0.002 for x in grid)
    assert largest_of(count) == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("hosts", [1, 4, 32, 256])
def test_the_slowest_gpu_is_that_of_drawn_clusters(hosts):
    drawn = numpy.random.default_rng(0)
    worst = []
    for _ in range(2000):
        speeds = 1 + P5.gpu_spread * drawn.standard_normal((hosts, P5.gpus_per_node))
        slow = drawn.random((hosts, 1)) < P5.straggler_share
        worst.append((speeds * numpy.where(slow, 1 + P5.straggler_slowdown, 1)).max() - 1)
    assert slowest(8 * hosts, P5) == pytest.approx(numpy.mean(worst), rel=0.05)


def test_without_spread_it_is_the_chance_that_any_host_is_slow():
    alike = dataclasses.replace(P5, gpu_spread=0.0)
    assert slowest(256, alike) == pytest.approx(0.10 * (1 - 0.995**32))
    assert slowest(1, P5) == 0.0
    nobody = dataclasses.replace(P5, straggler_share=0.0)
    assert slowest(64, nobody) == pytest.approx(0.0148 * largest_of(64))
