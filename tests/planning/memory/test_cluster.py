"""What a rank of a cluster holds, counted by hand."""

from __future__ import annotations

import pytest

from foundry_fp8.config import ConfigError
from foundry_fp8.planning.memory import measure as measuring
from foundry_fp8.planning.memory.cluster import Cluster, on_cluster
from foundry_fp8.planning.memory.measure import CostModel
from foundry_fp8.planning.memory.planner import measure
from tests.planning.memory.test_planner import build, loss_of


@pytest.fixture(scope="module")
def plain():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "CACHE_BYTES", 2**16)
        model = build(layers=4)
        measured = measure(model, loss_of(model), compression="none", cost_model=CostModel())
    return model, measured


def held(plain, sharding="FULL_SHARD", ranks=8, *, shard=None, accumulates=False, **options):
    model, measured = plain
    cluster = Cluster(world_size=ranks, sharding=sharding, shard=ranks if shard is None else shard, **options)
    return on_cluster(measured, model, cluster, optimizer_bytes=8 * elements(model), accumulates=accumulates)


def elements(model):
    return sum(p.numel() for p in model.parameters())


def test_parameters_and_optimizer_states_are_shared_and_so_are_gradients_of_earlier_microbatches(plain):
    model, _ = plain
    count, buffers = elements(model), sum(b.nbytes for b in model.buffers())
    for ranks in (2, 8):
        assert held(plain, ranks=ranks).frame.static == pytest.approx(12 * count / ranks + buffers, abs=ranks)
        assert held(plain, ranks=ranks, accumulates=True).frame.static == pytest.approx(
            16 * count / ranks + buffers, abs=ranks
        )
    # DDP has all of it, and buckets beside the gradients; its error feedback one more copy.
    assert held(plain, "NO_SHARD", shard=1).frame.static == 16 * count + buffers
    assert held(plain, "NO_SHARD", shard=1, residual=4).frame.static == 20 * count + buffers
    assert held(plain, "NO_SHARD", ranks=1).frame.static == 12 * count + buffers


def test_what_is_gathered(plain):
    """Without blocks: the root's; two blocks beside the one that runs; all of them until their backward with SHARD_GRAD_OP."""
    model, measured = plain
    block = elements(model.model.layers[0])
    root = elements(model) - 4 * block
    full, grad = held(plain), held(plain, "SHARD_GRAD_OP")
    assert full.frame.before - measured.frame.before == 4 * root
    assert grad.frame.before - measured.frame.before == 4 * elements(model)
    (alone,), (there,), (kept,) = measured.costs, full.costs, grad.costs
    assert there["none"].forward_peak - alone["none"].forward_peak == 2 * 4 * block
    assert (
        there["none"].backward_peak - alone["none"].backward_peak == 2 * 4 * block + 4 * block
    )  # one more is being reduced
    assert kept["none"].forward_peak == alone["none"].forward_peak
    assert (
        full.frame.left == (-(-4 * block // 8),) * 4 and held(plain, accumulates=True).frame.left == (0,) * 4
    )


def test_more_ranks_hold_less_and_hybrid_sharding_is_that_of_its_group(plain):
    peaks = [held(plain, ranks=ranks).peak("none") for ranks in (2, 4, 8, 64)]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] < held(plain, "NO_SHARD", shard=1).peak("none")
    assert held(plain, ranks=64, shard=8).peak("none") == held(plain, ranks=8).peak("none")
    assert held(plain, ranks=64, shard=8, residual=4).peak("none") > held(plain, ranks=8).peak("none")
    assert held(plain).peak("block") < held(plain).peak("none")


def test_frozen_parameters_have_neither_gradients_nor_states():
    model = build(layers=2).requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)
    measured = measure(model, loss_of(model), compression="none", cost_model=CostModel())
    trained = elements(model.model.layers[1].mlp)
    cluster = Cluster(world_size=4, sharding="FULL_SHARD", shard=4)
    there = on_cluster(measured, model, cluster, optimizer_bytes=8 * trained, accumulates=True)
    buffers = sum(b.nbytes for b in model.buffers())
    assert there.frame.static == pytest.approx((4 * elements(model) + 12 * trained) / 4 + buffers, abs=4)


def test_shards_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ConfigError, match="shard: 8 does not divide 7 ranks"):
        Cluster(world_size=7, sharding="FULL_SHARD", shard=8)
