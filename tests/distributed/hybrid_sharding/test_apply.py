import pytest
import torch

from foundry_fp8.compat import cpu_stream_events
from foundry_fp8.config import ConfigError, from_mapping
from foundry_fp8.distributed.hybrid_sharding.apply import (
    KEY,
    HybridShardingConfig,
    degrees_of,
    hybrid_degrees,
    state_bytes,
)


@pytest.mark.parametrize(
    "options",
    [
        {"shard": "nodes"},
        {"shard": 0},
        {"shard": True},
        {"state_fraction": 0.0},
        {"check_replicas": 1},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match="hybrid_sharding"):
        HybridShardingConfig(**options)


@pytest.mark.parametrize(
    ("shard", "wanted"), [("node", (2, 8)), (4, (4, 4)), (16, (1, 16)), ("auto", (4, 4))]
)
def test_degrees_multiply_to_the_world(shard, wanted):
    model, options = torch.nn.Linear(64, 64, device="meta"), HybridShardingConfig(shard=shard)
    room = state_bytes(model) / 4 / options.state_fraction
    assert degrees_of(model, options, world=16, per_node=8, device_bytes=1 + room) == wanted


def test_degrees_that_do_not_are_refused_with_those_that_do():
    options = HybridShardingConfig(shard=3)
    with pytest.raises(ConfigError, match="1, 2, 4, 8, 16"):
        degrees_of(torch.nn.Linear(2, 2), options, world=16, per_node=8, device_bytes=0)


def test_copies_are_what_the_ranks_give(caplog):
    assert from_mapping(HybridShardingConfig, {"shard": 2, "replicate": 4}, KEY) == HybridShardingConfig(
        shard=2
    )
    assert "hybrid_sharding.replicate: deprecated" in caplog.text


def test_state_counts_weights_gradients_and_moments_of_what_trains():
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 10, bias=False))
    model[1].weight.requires_grad_(False)
    assert state_bytes(model) == 100 * (4 + 4 + 8) + 100 * 4
    assert state_bytes(model.to("meta")) == 100 * (4 + 4 + 8) + 100 * 4


def test_the_patch_of_the_cpu_stream_is_still_needed():
    """Fails once torch records CPU events itself: then remove compat/cpu_stream_events.py."""
    original = torch.cpu.Stream.record_event
    try:
        if "cpu_stream_events" not in original.__module__:
            assert cpu_stream_events.needed()
        cpu_stream_events.apply()
        assert isinstance(torch.cpu.Stream().record_event(), torch.cpu.Event)
    finally:
        torch.cpu.Stream.record_event = original


def test_one_rank_is_warned_about_and_has_one_copy(caplog):
    assert hybrid_degrees(torch.nn.Linear(2, 2), HybridShardingConfig(), device=torch.device("cpu")) == (1, 1)
    assert "one rank" in caplog.text
