import pytest
import torch

from foundry_fp8.compat import cpu_stream_events
from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.hybrid_sharding.apply import HybridShardingConfig, hybrid_degrees, state_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"shard": "nodes"},
        {"shard": 0},
        {"shard": True},
        {"replicate": "node"},
        {"state_fraction": 0.0},
        {"check_replicas": 1},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match="hybrid_sharding"):
        HybridShardingConfig(**options)


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
