"""The option fused_head of a plan: what it says is what a step with it holds."""

import pytest
import torch

import foundry_fp8
from foundry_fp8.activations.fused_head.apply import fused_head_of
from foundry_fp8.planning.memory.cluster import Cluster, on_cluster
from foundry_fp8.planning.memory.cost_model import CostModel
from foundry_fp8.planning.memory.live_bytes import LiveBytes
from foundry_fp8.planning.memory.planner import choose, measure
from foundry_fp8.planning.memory.solver import predict_peak
from tests import model_zoo as zoo

WORDS = 16384


def llama():
    return zoo.hugging_face("Llama", vocab_size=WORDS).train()


def step_of(model):
    tokens, held = torch.randint(1, WORDS, (4, 128)), [None]

    def loss():
        held[0] = None
        held[0] = model(input_ids=tokens, labels=tokens)
        return held[0].loss

    return loss


def test_its_peak_is_the_measured_one():
    model = llama()
    loss = step_of(model)
    measured = measure(model, loss, cost_model=CostModel(), compression="none")
    assert measured.fused is not None and fused_head_of(model) is None
    costs = measured.costs_of(["none"] * len(measured.names))
    foundry_fp8.apply_fused_head(model)
    static = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    with LiveBytes() as meter:
        loss().backward()
    assert predict_peak(costs, measured.fused) == pytest.approx(static + meter.peak, rel=0.03)
    assert meter.peak + static < 0.5 * measured.peak("none")


def test_a_plan_shows_its_bytes_and_seconds():
    model = llama()
    measured = measure(model, step_of(model), cost_model=CostModel(), compression="none")
    product = 2 * 4 * 128 * 64 * WORDS / CostModel().flops_per_second
    assert measured.fused_seconds > product
    (line,) = [x for x in str(choose(measured, 1.0)).splitlines() if "fused_head" in x]
    assert "use_train_metrics: false" in line and "instead of" in line
    cluster = Cluster(world_size=8, sharding="FULL_SHARD", shard=8)
    sharded = on_cluster(measured, model, cluster, optimizer_bytes=0, accumulates=False)
    assert sharded.fused.head_backward_peak < sharded.frame.head_backward_peak


def test_a_model_that_looks_at_its_logits_has_no_such_option():
    model = llama()
    tokens = torch.randint(1, WORDS, (1, 16))

    def loss():
        logits = model(input_ids=tokens, labels=tokens).logits
        return torch.logsumexp(logits.float(), -1).mean()

    unlabelled = lambda: model(input_ids=tokens).logits.float().mean()  # noqa: E731
    for function in (loss, unlabelled):
        measured = measure(model, function, cost_model=CostModel(), compression="none")
        assert (
            measured.fused is None
            and fused_head_of(model) is None
            and "fused_head" not in str(choose(measured, 1.0))
        )
