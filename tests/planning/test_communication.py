import dataclasses

import pytest

from foundry_fp8.config import ConfigError
from foundry_fp8.planning.communication import (
    GPUS,
    NETWORKS,
    Workload,
    best_layout,
    bytes_per_element,
    check_published,
    collective_seconds,
    layout,
    plan_communication,
)

H100, EFA = GPUS["h100-sxm"], NETWORKS["h100-3200g"]
WORK = Workload(parameters=6.7e9, units=32, tokens=8192)


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


@pytest.mark.parametrize(("gpus", "published_ms"), [(64, 150), (512, 355), (2048, 1052), (4096, 1981)])
def test_flat_fsdp_of_7b_agrees_with_an_independent_calculation(gpus, published_ms):
    """Computed separately from the same constants with a 7.0e9 parameter model; ours is 6.7e9."""
    seconds = layout(WORK, gpus, gpus, H100, EFA).communication_seconds
    assert seconds * 1e3 == pytest.approx(published_ms, rel=0.05)


def test_latency_grows_with_ranks_and_compression_cuts_only_bytes():
    packed = dataclasses.replace(WORK, gradients="int8", weights="e4m3")
    gains = []
    for gpus in (64, 512, 4096):
        plain, small = (layout(w, gpus, gpus, H100, EFA).communication_seconds for w in (WORK, packed))
        gains.append(1 - small / plain)
    assert gains[0] > 0.15 and gains[0] > gains[1] > gains[2] > 0


@pytest.mark.parametrize("gpus", [512, 4096, 16384])
def test_the_best_hybrid_layout_beats_flat_fsdp_at_scale_and_fits(gpus):
    best, flat = best_layout(WORK, gpus, H100, EFA), layout(WORK, gpus, gpus, H100, EFA)
    assert best.fits and best.shard * best.replicate == gpus and best.shard < gpus
    assert best.communication_seconds < flat.communication_seconds
    assert best.exposed_seconds <= flat.exposed_seconds


def test_memory_is_the_state_over_the_shard():
    # 16 bytes a parameter, and two gathered BF16 units.
    assert layout(WORK, 64, 8, H100, EFA).memory_bytes == pytest.approx(6.7e9 * 16 / 8 + 4 * 6.7e9 / 32)


def test_a_model_that_does_not_fit_is_an_error():
    with pytest.raises(ConfigError, match="do not hold the model"):
        best_layout(dataclasses.replace(WORK, parameters=1e12), 64, H100, EFA)


@pytest.mark.parametrize(("name", "wanted"), [("bf16", 2), ("int8", 1 + 4 / 128), ("int4", 0.5 + 4 / 128)])
def test_bytes_per_element_count_the_scales(name, wanted):
    assert bytes_per_element(name) == wanted


def test_published_points_are_predicted_with_the_error_the_card_states():
    rows = [row for row in check_published() if not row["baseline"]]
    assert len(rows) == 22
    errors = {(row["series"], row["gpus"]): abs(row["error_percent"]) for row in rows}
    assert all(error < 8 for (_, gpus), error in errors.items() if gpus <= 64)
    assert max(errors.values()) < 20  # 256 GPUs: the model has no stragglers, and says too much
    assert max(errors.values()) > 5  # nothing is fitted


def test_every_row_of_the_plan_is_complete():
    rows = plan_communication(WORK, [64, 128], H100, EFA)
    assert len(rows) == 8 and {row["gpus"] for row in rows} == {64, 128}
    assert all(row["exposed_ms"] <= row["communication_ms"] and 0 < row["efficiency"] <= 1 for row in rows)


def test_unknown_formats_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'int8'"):
        Workload(parameters=1, units=1, tokens=1, gradients="int88")
