"""What the first batch shows: layers that nobody calls, weights in no row, parameters that are only added."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import foundry_fp8
from foundry_fp8.surgery.first_batch import ForwardTrace, as_run


class Block(nn.Module):
    """Calls ``up``, multiplies by ``down``'s weight itself and never uses ``spare``."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.spare = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32)
        self.register_buffer("mask", torch.ones(32, 64))

    def forward(self, x):
        return F.linear(self.up(x).relu(), self.down.weight * self.mask)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.position = nn.Parameter(torch.randn(8, 32))
        self.experts = nn.Parameter(torch.randn(4, 32, 32))
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids):
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x = x + torch.stack([x @ expert for expert in self.experts.unbind()]).mean(0)
        return x @ self.embedding.weight.to(torch.float32).T


def traced(model, ids, **autocast):
    report = foundry_fp8.apply_fp8(model, recipe="current")
    trace = ForwardTrace(model)
    trace.arm()
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
        loss = model(ids).float().pow(2).mean()
    loss.backward()
    return report, trace


def test_the_report_of_what_ran():
    model, ids = Model(), torch.randint(0, 48, (2, 8))
    report, trace = traced(model, ids)
    assert trace.complete and len(report.converted) == 6
    ran, warnings = as_run(report, trace)
    assert ran.converted == ["blocks.0.up", "blocks.1.up"]
    rows = {row.name: row for row in ran.rows}
    assert rows["blocks.0.up"].precision == "fp8"
    assert (rows["blocks.0.down"].action, rows["blocks.0.down"].precision) == ("skipped", "fp32")
    assert rows["blocks.0.down"].reason == "converted, but blocks.* multiplies by its weight itself"
    assert (rows["blocks.1.spare"].action, rows["blocks.1.spare"].reason) == (
        "unused",
        "converted, but nothing called it",
    )
    assert (rows["position"].action, rows["experts"].action) == ("unused", "skipped")
    assert rows["experts"].precision == "fp32"
    assert rows["embedding.weight"].reason == "Model multiplies by it itself"
    multiplied = 2 * 2 * 32 * 64 + 4 * 32 * 32 + 48 * 32
    assert ran.converted_share == 2 * 32 * 64 / multiplied
    assert len(warnings) == 2
    assert warnings[0].startswith(
        "blocks.{0-1}.down: converted to FP8, but in the first batch blocks.* multiplies by its"
    )
    assert warnings[1].startswith(
        "blocks.{0-1}.spare: converted to FP8, but in the first batch nothing called it"
    )
    assert (
        "not multiplied: used otherwise than in a product" in ran.summary()
        and "not multiplied" in ran.table()
    )
    assert "blocks.{0-1}.spare" in ran.table() and ran.to_dict()["converted"] == 2


def test_autocast_is_the_precision_of_what_ran():
    report, trace = traced(Model(), torch.randint(0, 48, (2, 8)), on=True)
    rows = {row.name: row for row in as_run(report, trace)[0].rows}
    assert rows["experts"].precision == rows["embedding.weight"].precision == "bf16"


def test_the_trace_takes_its_hooks_away_and_survives_a_forward_that_raises():
    model = Model()
    trace = ForwardTrace(model)
    trace.arm()
    model.eval()
    model(torch.zeros(1, 8, dtype=torch.long))  # evaluation is not watched
    model.train()
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 9, dtype=torch.long))  # a position too many
    assert not trace.complete and not trace.products
    F.linear(torch.ones(1, 32), model.blocks[0].up.weight)
    assert not trace.products
    model(torch.zeros(1, 8, dtype=torch.long))
    assert trace.complete and "blocks.0.up.weight" in trace.products
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_expert_without_tokens_is_no_warning():
    model = nn.Module()
    model.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    model.forward = lambda x: model.experts[1](x)  # what a router might choose
    report, trace = traced(nn.Sequential(model), torch.randn(4, 32))
    ran, warnings = as_run(report, trace)
    assert warnings == [] and len(ran.converted) == 3
