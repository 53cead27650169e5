"""MFU, kurtosis and operand health in a plain loop give what they give in a trainer."""

from __future__ import annotations

import torch

import foundry_fp8
from foundry_fp8.observe.flops.mfu import MFUMeter
from foundry_fp8.observe.health_meter import HealthMeter
from foundry_fp8.observe.kurtosis_meter import KurtosisMeter
from tests.callbacks.conftest import build_llama
from tests.observe.test_precision_probe import loss_of, tokens

PEAKS = {"fp32": 1e12, "bf16": 2e12, "fp8": 4e12}


def test_a_plain_loop_measures_with_three_objects():
    model = build_llama().train()
    foundry_fp8.apply_fp8(model, recipe="delayed", backend="emulated")
    mfu = MFUMeter(model, interval=3, peak_flops=PEAKS)
    kurtosis, health = KurtosisMeter(model, interval=2), HealthMeter(model, interval=2)
    found = []
    for step in range(4):
        batch = tokens(seed=step)
        mfu.begin()
        kurtosis.begin(step)
        health.begin(step)
        loss_of(model, batch).backward()
        found.append((mfu.step(batch, 0.5), kurtosis.end(), health.end(step + 1)))
    assert [bool(logged) for logged, _, _ in found] == [False, True, True, False]
    assert [bool(metrics) for _, (metrics, _), _ in found] == [False, True, False, True]
    assert [report is not None for _, _, report in found] == [False, True, False, True]
    assert found[1][0]["mfu/tokens_per_sec_per_device"] == 128
    assert mfu.rest()["mfu/tokens_per_sec_per_device"] == 128
    assert found[3][2].worst and torch.isfinite(torch.tensor(found[3][2].metrics["fp8/sqnr_db/dy/worst"]))
