"""The model of a step against sums done by hand, and what it must say of layouts."""

import dataclasses

import pytest

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compression.config import CompressionConfig
from foundry_fp8.gpus import GPUS
from foundry_fp8.planning.communication import legs, step
from foundry_fp8.planning.communication.machines import NETWORKS
from foundry_fp8.planning.communication.step import (
    COMPRESSED,
    Workload,
    best_layout,
    layout,
    plan_communication,
    slowest,
)

H100, EFA = GPUS["h100"], NETWORKS["h100-3200g"]
SLOW = NETWORKS["ethernet-100g"]
WORK = Workload(parameters=6.7e9, units=32, tokens=8192)
PACKED = dataclasses.replace(WORK, compression=COMPRESSED)


@pytest.mark.parametrize(("gpus", "published_ms"), [(64, 150), (512, 355), (2048, 1052), (4096, 1981)])
def test_flat_fsdp_of_7b_agrees_with_an_independent_calculation(gpus, published_ms):
    """Computed separately from the same constants with a 7.0e9 parameter model; ours is 6.7e9."""
    seconds = layout(WORK, gpus, gpus, H100, EFA).communication_seconds
    assert seconds * 1e3 == pytest.approx(published_ms, rel=0.05)


@pytest.mark.parametrize("shard", [64, 8])
def test_a_step_is_computing_slowed_by_what_runs_beside_it_and_by_the_slowest_gpu(shard):
    found = layout(WORK, 64, shard, H100, EFA)
    compute = 6 * 6.7e9 * 8192 / (0.4 * 989.4e12)
    assert found.compute_seconds == pytest.approx(compute)
    hidden = found.communication_seconds - found.exposed_seconds
    wanted = (compute + 0.189 * hidden) * (1 + slowest(64, EFA)) + found.exposed_seconds
    assert found.step_seconds == pytest.approx(wanted)
    alone = layout(WORK, 1, 1, H100, EFA)
    assert alone.step_seconds == alone.compute_seconds and alone.communication_seconds == 0


def test_a_step_that_waits_for_its_host_hides_communication_until_that_is_longer():
    alone, spread = (layout(WORK, n, n, H100, EFA).step_seconds for n in (8, 4096))
    assert alone < 1.0 < spread
    hosted = dataclasses.replace(WORK, host_seconds=1.0)
    assert layout(hosted, 8, 8, H100, EFA).step_seconds == 1.0
    assert layout(hosted, 4096, 4096, H100, EFA).step_seconds == spread


def test_what_computing_cannot_hide_is_exposed():
    """A gather and a reduction where there is computing enough; all but the computing where there is too little."""
    kept = dataclasses.replace(WORK, sharding="SHARD_GRAD_OP")
    full, grad = (layout(work, 64, 64, H100, EFA).communication_seconds / 32 for work in (WORK, kept))
    gather = full - grad
    scatter = grad - gather
    busy = layout(dataclasses.replace(WORK, tokens=10**8), 64, 64, H100, EFA)
    assert busy.exposed_seconds == pytest.approx(gather + scatter)
    idle = layout(dataclasses.replace(WORK, tokens=64), 64, 64, H100, EFA)
    assert idle.exposed_seconds == pytest.approx(idle.communication_seconds - idle.compute_seconds)


def test_attention_microbatches_and_what_backward_gathers_again():
    attention = dataclasses.replace(WORK, attention_flops=6.7e9)
    assert layout(attention, 64, 64, H100, EFA).compute_seconds == pytest.approx(
        layout(WORK, 64, 64, H100, EFA).compute_seconds * 7 / 6
    )
    four = dataclasses.replace(WORK, microbatches=4)
    assert layout(four, 64, 64, H100, EFA).communication_seconds == pytest.approx(
        4 * layout(WORK, 64, 64, H100, EFA).communication_seconds
    )
    kept = dataclasses.replace(WORK, sharding="SHARD_GRAD_OP")
    full, grad = layout(WORK, 64, 64, H100, EFA), layout(kept, 64, 64, H100, EFA)
    assert grad.communication_seconds == pytest.approx(full.communication_seconds * 2 / 3)
    assert grad.memory_bytes - full.memory_bytes == pytest.approx(2 * 6.7e9 * 30 / 32)


def test_a_ring_of_codes_saves_bytes_alone_and_two_hops_save_latency_too():
    gathered = dataclasses.replace(WORK, compression=CompressionConfig(gradients="none", parameters="e4m3"))
    reduced = dataclasses.replace(WORK, compression=CompressionConfig(gradients="int8"))
    gains = {"ring": [], "two hops": []}
    for gpus in (64, 512, 4096):
        plain = layout(WORK, gpus, gpus, H100, EFA).communication_seconds
        for name, work in (("ring", gathered), ("two hops", reduced)):
            gains[name].append(1 - layout(work, gpus, gpus, H100, EFA).communication_seconds / plain)
    assert gains["ring"][0] > gains["ring"][1] > gains["ring"][2] > 0
    assert gains["two hops"][0] < gains["two hops"][1] < gains["two hops"][2]


@pytest.mark.parametrize("gpus", [512, 4096, 16384])
def test_the_best_hybrid_layout_beats_flat_fsdp_at_scale_and_fits(gpus):
    best, flat = best_layout(WORK, gpus, H100, EFA), layout(WORK, gpus, gpus, H100, EFA)
    assert best.fits and best.shard * best.replicate == gpus and best.shard < gpus
    assert best.communication_seconds < flat.communication_seconds
    assert best.step_seconds <= flat.step_seconds


def test_memory_is_the_state_over_the_shard_and_what_error_feedback_carries():
    # 16 bytes a parameter, and two gathered BF16 units.
    state = 6.7e9 * 16 / 8 + 4 * 6.7e9 / 32
    assert layout(WORK, 64, 8, H100, EFA).memory_bytes == pytest.approx(state)
    assert layout(PACKED, 64, 8, H100, EFA).memory_bytes == pytest.approx(state + 4 * 6.7e9 / 8)
    flat = layout(WORK, 64, 64, H100, EFA).memory_bytes
    assert layout(PACKED, 64, 64, H100, EFA).memory_bytes == flat  # a reduce-scatter carries nothing


@pytest.mark.parametrize(
    ("name", "gpus", "together", "shards"),
    [
        ("h100-3200g", 96, 1, [1, 2, 4, 8, 16, 24, 32, 48, 96]),
        ("h100-3200g", 96, 4, [1, 2, 4, 6, 8, 12, 24]),
        ("gb200-nvl72", 144, 4, [1, 2, 3, 6, 9, 18, 36]),
    ],
)
def test_copies_of_the_model_fill_nodes_or_divide_them(monkeypatch, name, gpus, together, shards):
    """Under tensor parallelism a copy is ``together`` times as many GPUs as its shards."""
    tried = []

    def record(work, gpus, shard, gpu, network):
        tried.append(shard)
        return layout(work, gpus, shard, gpu, network)

    monkeypatch.setattr(step, "layout", record)
    work = dataclasses.replace(WORK, tensor_parallel=together, width=4096)
    best_layout(work, gpus, H100, NETWORKS[name])
    assert tried == shards


def test_tensor_parallelism_divides_matrices_and_reduces_activations_four_times_a_block():
    """64 GPUs in groups of four on a node: sums done by hand, with Megatron-LM's two all-reduces a block and direction."""
    work = dataclasses.replace(WORK, tensor_parallel=4, width=4096)
    found = layout(work, 64, 16, H100, EFA)
    assert (found.replicate, found.shard, found.tensor_parallel) == (1, 16, 4)
    assert found.compute_seconds == pytest.approx(layout(WORK, 64, 64, H100, EFA).compute_seconds / 4)
    joined = 4 * 32 * (8.4e-6 + 2 * (3 * 3.4e-6 + 2 * 8192 * 4096 / 360e9 * 3 / 4))
    # Each GPU's quarter of a unit over 16 ranks, two of them on each of 8 nodes, four such groups through a node's network.
    unit = 2 * 6.7e9 / 32 / 4
    ring = 8.4e-6 + 8 * 3.4e-6 + 7 * 14e-6 + unit / (340e9 / 4) * 15 / 16
    assert found.communication_seconds == pytest.approx(joined + 3 * 32 * ring)
    assert found.exposed_seconds > joined
    assert found.memory_bytes == pytest.approx(6.7e9 / 4 * 16 / 16 + 2 * unit)
    rows = plan_communication(work, [64], H100, EFA)
    assert {row["wire"] for row in rows} == {"bf16"} and rows[0]["layout"] == "FSDP 1x16 TP 4"
    for changes, said in (({"tensor_parallel": 3}, "does not divide"), ({"width": 0.0}, "--width"),
                          ({"compression": COMPRESSED}, "not planned beside")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            layout(dataclasses.replace(work, **changes), 64, 16, H100, EFA)


def test_layouts_that_training_refuses_are_not_planned():
    """Copies of 12 on nodes of 8 have 8 ranks on one node and 4 on the next: two hops cannot serve them."""
    with pytest.raises(ConfigError, match="a group of 12 of the 24 ranks has 4 to 8"):
        layout(PACKED, 24, 12, H100, EFA)
    assert best_layout(PACKED, 24, H100, EFA).shard != 12
    everywhere = dataclasses.replace(COMPRESSED, scope="all")
    layout(dataclasses.replace(WORK, compression=everywhere), 24, 12, H100, EFA)
    assert layout(PACKED, 64, 16, H100, EFA).shard == 16  # whole nodes


def test_inside_a_node_nothing_is_compressed_unless_asked():
    """HSDP with shards inside nodes: the shard leg and the gather travel as they are."""
    gathered = dataclasses.replace(COMPRESSED, gradients="none")
    assert layout(
        dataclasses.replace(WORK, compression=gathered), 64, 8, H100, EFA
    ).communication_seconds == (layout(WORK, 64, 8, H100, EFA).communication_seconds)
    everywhere = dataclasses.replace(gathered, scope="all")
    slow = dataclasses.replace(EFA, inside_bus=1e9)
    plain, coded = (
        layout(dataclasses.replace(WORK, compression=one), 64, 8, H100, slow) for one in (None, everywhere)
    )
    assert coded.communication_seconds < 0.8 * plain.communication_seconds


@pytest.mark.parametrize("gpus", [16, 64, 512])
def test_compression_pays_where_the_network_is_slow(gpus):
    for gradients in ("int8", "e4m3"):
        config = CompressionConfig(gradients=gradients)
        packed = dataclasses.replace(WORK, compression=config)
        assert (
            layout(packed, gpus, gpus, H100, SLOW).step_seconds
            < layout(WORK, gpus, gpus, H100, SLOW).step_seconds
        )


def test_a_model_that_does_not_fit_is_an_error():
    with pytest.raises(ConfigError, match="do not hold the model"):
        best_layout(dataclasses.replace(WORK, parameters=1e12), 64, H100, EFA)


def test_every_row_of_the_plan_is_complete():
    rows = plan_communication(WORK, [64, 128], H100, EFA)
    assert len(rows) == 8 and {row["gpus"] for row in rows} == {64, 128}
    assert all(row["exposed_ms"] <= row["communication_ms"] and 0 < row["efficiency"] <= 1 for row in rows)
    assert {row["wire"] for row in rows} == {"bf16", "int8/e4m3"}
    own = dataclasses.replace(WORK, compression=CompressionConfig(gradients="e4m3"))
    assert {row["wire"] for row in plan_communication(own, [64], H100, EFA)} == {"bf16", "e4m3/none"}


@pytest.mark.parametrize("shard", [64, 8])
def test_frozen_parameters_are_gathered_and_no_more(shard):
    """LoRA: no gradients of them to reduce, to hold, or to compute, and hardly any states."""
    whole = layout(WORK, 64, shard, H100, EFA)
    work = dataclasses.replace(WORK, trained=0.01, optimizer_bytes=0.08)
    lora = layout(work, 64, shard, H100, EFA)
    assert lora.compute_seconds == pytest.approx(whole.compute_seconds * 4.02 / 6)
    assert lora.memory_bytes == pytest.approx(6.7e9 * (4.04 + 0.08) / shard + 4 * 6.7e9 / 32)
    gathers = 2 * 32 * legs.Wires(EFA, H100).gather(6.7e9 / 32, 2, shard, None)
    reduced = whole.communication_seconds - gathers, lora.communication_seconds - gathers
    assert 0 < reduced[1] < 0.3 * reduced[0]
    packed = [
        layout(dataclasses.replace(one, compression=COMPRESSED), 64, 8, H100, EFA).memory_bytes
        for one in (WORK, work)
    ]
    assert packed[1] < packed[0]


def test_what_checkpoints_repeat_is_the_backwards():
    """Where gathers outlast the forward and reductions fit the backward, a shorter forward exposes as much more."""
    work = Workload(
        parameters=7e9,
        units=32,
        tokens=2048,
        parameter_bytes=4,
        sharding="SHARD_GRAD_OP",
        compute_seconds=0.2,
    )
    plain, again = (
        layout(dataclasses.replace(work, repeated=r), 64, 64, GPUS["h100"], NETWORKS["h100-1600g"])
        for r in (0.0, 0.25)
    )
    assert again.exposed_seconds - plain.exposed_seconds == pytest.approx(0.2 / 3 * (1 - 1 / 1.25))
    assert again.compute_seconds == plain.compute_seconds == 0.2
