"""Offloading as an option of a plan: its bytes are those of a step, its seconds those of the link where nothing hides them."""

import dataclasses

import pytest
import torch

from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing
from foundry_fp8.activations.offload.store import host_store
from foundry_fp8.planning.memory.cluster import Cluster, on_cluster
from foundry_fp8.planning.memory.cost_model import CostModel
from foundry_fp8.planning.memory.host_link import HOST_LINKS, host_link_of, offloaded
from foundry_fp8.planning.memory.live_bytes import LiveBytes
from foundry_fp8.planning.memory.planner import apply_plan, choose, measure
from foundry_fp8.planning.memory.solver import Cost, predict_peak
from tests.planning.memory.test_planner import build, loss_of, static

TOKENS = torch.randint(0, 256, (8, 256), generator=torch.Generator().manual_seed(0))
"""Enough that activations are more than gradients."""


@pytest.fixture(scope="module")
def measured():
    model = build(6)
    return measure(model, loss_of(model, TOKENS), cost_model=CostModel(), compression="none")


def device_peak(model):
    """Of a step, host buffers left out: those of the step before are used again."""
    loss_of(model, TOKENS)().backward()
    model.zero_grad(set_to_none=True)
    held = host_store(torch.device("cpu")).held
    with LiveBytes() as meter:
        loss_of(model, TOKENS)().backward()
    assert host_store(torch.device("cpu")).held == held
    return static(model) + meter.peak


@pytest.mark.parametrize(
    "options",
    [
        {"offload": True},
        pytest.param({"policy": "offload"}, marks=pytest.mark.full),
        pytest.param({"targets": "LlamaMLP", "policy": "offload"}, marks=pytest.mark.full),
    ],
)
def test_the_predicted_peak_is_the_measured_one(measured, options):
    model = build(6)
    apply_activation_checkpointing(model, **options)
    if "targets" in options:  # a part of it is no option of a plan
        assert device_peak(model) < 0.95 * device_peak(build(6))
        return
    name = options.get("policy", "block")
    costs = measured.costs_of([name] * 6, offload="offload" in options)
    assert predict_peak(costs, measured.frame) == pytest.approx(device_peak(model), rel=0.03)
    assert all(cost.moved for cost in costs)


def test_what_moves_is_what_the_store_moves(measured):
    store = host_store(torch.device("cpu"))
    for options, name in (({"offload": True}, "block"), ({"policy": "offload"}, "offload")):
        model = build(6)
        apply_activation_checkpointing(model, **options)
        before = store.moved
        loss_of(model, TOKENS)().backward()
        costs = measured.costs_of([name] * 6, offload=True)
        assert sum(cost.moved for cost in costs) == pytest.approx(store.moved - before, rel=0.01)


def test_a_plan_takes_it_where_the_link_hides_it_and_pins_it(measured):
    """On this cost model's small blocks PCIe takes longer than computing; over a link without end all goes to host memory."""
    fast = dataclasses.replace(HOST_LINKS["c2c"], out=1e15, back=1e15)
    model = build(6)

    def with_link(link):
        costs = dict(measured.costs[0])
        whole = costs["offload"].moved
        costs["offload"] = offloaded(costs["none"], whole, costs["none"], link)
        return dataclasses.replace(measured, costs=(costs,), link=link)

    budget = f"{(measured.peak('none') + measured.peak('block')) // 2}B"
    plan = choose(with_link(fast), budget)
    assert "offload" in plan.chosen and plan.added_seconds == pytest.approx(0, abs=1e-9)
    assert "policy: offload" in plan.to_yaml()
    reference = build(6)
    loss_of(reference, TOKENS)().backward()
    apply_plan(model, plan)
    loss_of(model, TOKENS)().backward()
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    )
    slow = choose(with_link(dataclasses.replace(fast, out=1e6, back=1e6)), budget)
    assert "offload" not in slow.chosen


def test_a_plan_says_what_its_boundaries_would_take(measured):
    tight = f"{int(1.02 * measured.peak('block'))}B"
    plan = choose(measured, tight)
    (line,) = [x for x in str(plan).splitlines() if x.startswith("option offload")]
    moving = plan.costs(offload=True)
    seconds = sum(c.seconds for c in moving) - sum(c.seconds for c in plan.costs())
    assert f"{seconds:+.2g} s" in line and HOST_LINKS["pcie5"].source in line
    assert predict_peak(moving, plan.frame) < plan.predicted_peak
    lower = choose(
        measured, f"{predict_peak(measured.costs_of(['block'] * 6, True), measured.frame)}B", offload=True
    )
    assert lower.predicted_peak < measured.peak("block")
    assert lower.to_config()["activation_checkpointing"]["offload"] is True


def test_on_a_cpu_there_is_nothing_to_move():
    model = build(2)
    plain = measure(model, loss_of(model), rounds=1, compression="none")
    assert plain.link is None and "offload" not in plain.costs[0]
    assert plain.costs_of(["block"] * 2, offload=True) == plain.costs_of(["block"] * 2)
    assert "host memory and back" not in str(choose(plain, 1.0))


def test_of_a_cluster_the_same_bytes_move(measured):
    cluster = Cluster(world_size=8, sharding="FULL_SHARD", shard=8)
    there = on_cluster(measured, build(6), cluster, optimizer_bytes=0, accumulates=True)
    assert [c.moved for c in there.costs_of(["offload"] * 6)] == [
        c.moved for c in measured.costs_of(["offload"] * 6)
    ]
    assert predict_peak(there.costs_of(["block"] * 6, True), there.frame) < there.peak("block")


def test_seconds_by_hand():
    """300 bytes: 30 s out beside a forward of 10, 15 s back beside a backward of 20, or of 8."""
    link = dataclasses.replace(HOST_LINKS["c2c"], out=10.0, back=20.0)
    plain = Cost(kept=400, forward_peak=500, backward_peak=600, seconds=30.0)
    moved = offloaded(plain, 300, plain, link)
    assert moved == dataclasses.replace(plain, kept=100, moved=300, seconds=30.0 + 20.0)
    assert offloaded(dataclasses.replace(plain, seconds=18.0), 300, plain, link).seconds == 18.0 + 20.0 + 7.0
    assert offloaded(plain, 90, plain, link).seconds == 30.0


@pytest.mark.parametrize(
    ("gpu", "link"),
    [
        ("h100", "pcie5"),
        ("NVIDIA H100 80GB HBM3", "pcie5"),
        ("NVIDIA A100-SXM4-80GB", "pcie4"),
        ("NVIDIA GH200 480GB", "c2c"),
        ("gb200", "c2c"),
    ],
)
def test_which_link_a_gpu_has(gpu, link):
    assert host_link_of(gpu) is HOST_LINKS[link]
