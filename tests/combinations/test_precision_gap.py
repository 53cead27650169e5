"""A measurement of FP8's error leaves no trace: beside every feature, a run that measures is the run that does not, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import foundry_fp8
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.surgery.attention import FP8AttentionState
from tests.combinations.models import batch
from tests.combinations.running import LEARNING_RATE, STEPS, backward, digest, interpreted, loss_of, switch_on
from tests.combinations.space import Case, pairs
from tests.combinations.test_pairs import IMPORTS, world_of
from tests.combinations.wrapping import clip, parameters_of
from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess
SAMPLE = (
    Case(
        model="odd", dtype="bfloat16", fp8="block", checkpoint="offload", compression="int8", lora=True, tied=True,
        accumulation="two-unsynchronised", clip=True, wrapped="last", evaluate=True,
    ),
    Case(wrapper="ddp", fp8="delayed", attention=True, accumulation="two-forwards"),
    Case(
        model="odd", wrapper="fsdp1", dtype="float16", fp8="mxfp8", tied=True, accumulation="two-forwards", clip=True
    ),
    Case(wrapper="fsdp2", fp8="block"),
)  # fmt: skip
"""Rows of the default tier, one for each wrapper."""


def run(case: Case) -> dict[str, Any]:
    """What this rank has after training without measurements, and with one before every step."""
    dist.init_process_group("gloo")
    with interpreted(case):
        found = {"without": trained(case, gaps=None), "gaps": (gaps := [])}
        found["with"] = trained(case, gaps=gaps)
    dist.barrier()
    return found


def trained(case: Case, gaps: list[Any] | None) -> dict[str, Any]:
    torch.manual_seed(5)
    model, reports = switch_on(case)
    compression, head = reports.get("communication"), reports.get("head")
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.5)
    found: dict[str, Any] = {"steps": []}
    for step in range(STEPS):
        if compression is not None:
            compression.start_batch(step)
        if gaps is not None:
            microbatch = batch(step, dist.get_rank(), 0)
            gap = foundry_fp8.precision_gap(model, lambda m, b: loss_of(case, m, b, head=head), microbatch)
            gaps.append((gap.loss, gap.loss_gap, dict(gap.gradient_error)))
        backward(case, model, step, head=head)
        if case.clip:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
        found["steps"].append(digest(parameters_of(model)))
    for kind in (FP8State, FP8AttentionState):
        state = kind.of(model)
        if state is not None:
            found[kind.NAME] = {
                name: digest(tensors) for name, tensors in state.state_dict()["modules"].items()
            }
    layers = [m for m in model.modules() if isinstance(m, FP8Linear | FP8DotProductAttention)]
    found["ledgers"] = [(m.fqn, m.ledger.flops, m.ledger.recomputed_flops, m.ledger.calls) for m in layers]
    found["random"] = digest({"state": torch.get_rng_state()})
    if compression is not None:
        found["residuals"] = digest({str(i): r for i, r in enumerate(compression.residuals())})
        traffic = compression.traffic
        found["traffic"] = (dict(traffic.sent), dict(traffic.calls), traffic.logical)
    return found


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", pairs(SAMPLE, metafunc.config.option.markexpr), ids=str)


def test_a_measurement_leaves_no_trace(case):
    for rank in launch.call(run, world_of(case), case, imports=IMPORTS, timeout=300):
        assert rank["with"] == rank["without"]
        for loss, gap, errors in rank["gaps"]:
            assert math.isfinite(loss) and errors
            if case.fp8 == "none":
                assert gap == 0 and not any(errors.values())
        if case.fp8 != "none":
            assert any(error > 1e-3 for *_, errors in rank["gaps"] for error in errors.values())
