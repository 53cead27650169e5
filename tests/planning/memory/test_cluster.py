"""What a rank of a cluster holds, counted by hand."""

from __future__ import annotations

import pytest

from foundry_fp8.config import ConfigError
from foundry_fp8.planning.memory import measure as measuring
from foundry_fp8.planning.memory.cluster import Cluster, on_cluster
from foundry_fp8.planning.memory.cost_model import CostModel
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
    """The root's always; under FULL_SHARD two blocks' size beside it, of the first block's backward one; under SHARD_GRAD_OP every block
    from its forward to its backward.
    """
    model, measured = plain
    block = 4 * elements(model.model.layers[0])
    root = 4 * elements(model) - 4 * block
    for fsdp in (1, 2):
        full, grad = (held(plain, kind, fsdp=fsdp).frame for kind in ("FULL_SHARD", "SHARD_GRAD_OP"))
        assert full.before - measured.frame.before == root
        assert full.beside_forward == (2 * block,) * 4
        # Beside parameters: the gradients of the block behind, none behind the last.
        assert full.beside_backward == (2 * block, 3 * block, 3 * block, 2 * block)
        assert grad.before - measured.frame.before == root + 4 * block
        behind = (-2 * block, -block, 0, 0 if fsdp == 1 else block)
        assert grad.beside_forward == behind
        assert grad.beside_backward == (-2 * block, -block, 0, 0)
        assert full.left == grad.left == (-(-block // 8),) * 4
        assert held(plain, fsdp=fsdp, accumulates=True).frame.left == (0,) * 4
    # Nothing runs beside the computation on a CPU: FSDP1 holds one block in forward, and what it reduces is gone before the next.
    alone = held(plain, overlaps=False).frame
    assert alone.beside_forward == (block,) * 4
    assert alone.beside_backward == (block, 2 * block, 2 * block, 2 * block)


def test_gradients_that_are_reduced_in_another_type_are_there_twice(plain):
    model, _ = plain
    block = elements(model.model.layers[0])
    shard = 4 * block // 8
    one, two = (held(plain, fsdp=fsdp, gathered=2, reduced=4).frame for fsdp in (1, 2))
    assert two.beside_backward == (2 * block + 4 * block, *(4 * block + 4 * block,) * 2, 4 * block)
    assert one.beside_backward == (2 * block + 6 * block, *(4 * block + 6 * block,) * 2, 4 * block)
    # The next block is gathered; FSDP2 has the gradients and their copy, FSDP1 beside them a shard of the result.
    assert two.reducing == (6 * block, *(2 * block + 6 * block,) * 3)
    assert one.reducing[3] == 2 * block + 6 * block + shard


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
