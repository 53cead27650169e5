"""FP8 health: the measurement against float64, and the callback in real runs."""

from __future__ import annotations

import json
import math

import pytest
import torch

from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.quantize import (
    amax_of,
    quantize_block,
    quantize_mx,
    quantize_tensor,
    scale_from_amax,
)
from foundry_fp8.observe.operand_health import SAMPLE, HealthProbe, measure, summarise
from foundry_fp8.surgery.apply import apply_fp8
from tests.callbacks.conftest import build_llama, series


def health(x, q):
    return summarise(measure(x, q).tolist())


def quantised(x, kind):
    match kind:
        case "tensor":
            return quantize_tensor(x, scale_from_amax(amax_of(x), E4M3), E4M3)
        case "block":
            return quantize_block(x, (1, 128), E4M3)
        case "mx":
            return quantize_mx(x, (1, 32), E4M3)


@pytest.mark.parametrize(("fmt", "beyond"), [(E4M3, 470.0), (E5M2, 62000.0)])
def test_saturation_counts_what_the_limit_clipped_and_not_what_rounding_would_have_done(fmt, beyond):
    half_step = {448.0: 16.0, 57344.0: 4096.0}[fmt.max]
    x = torch.tensor([[1.0, -beyond, fmt.max + half_step, fmt.max], [beyond * 2, 1.0, 0.0, -2.0]])
    got = health(x, quantize_tensor(x, torch.tensor(1.0), fmt))
    assert got.saturated == pytest.approx(2 / 8)
    assert got.amax == beyond * 2
    assert got.scale == 1.0


def test_flushed_counts_nonzeros_that_became_zero():
    tiny = E4M3.min_subnormal
    x = torch.tensor([[1.0, 0.0, tiny, tiny * 0.49], [-tiny * 0.49, 0.0, 2.0, -1.0]])
    assert health(x, quantize_tensor(x, torch.tensor(1.0), E4M3)).flushed == pytest.approx(2 / 8)


@pytest.mark.parametrize("kind", ["tensor", "block", "mx"])
def test_sqnr_and_scale_against_float64(kind):
    torch.manual_seed(0)
    x = torch.randn(128, 256) * torch.logspace(-2, 2, 128)[:, None]
    q = quantised(x, kind)
    got = health(x, q)
    back = q.data.double() * q.expanded(q.scale_inv).double()
    expected = 20 * math.log10(float(x.double().norm() / (x.double() - back).norm()))
    assert got.sqnr_db == pytest.approx(expected, abs=1e-3)
    assert got.amax == float(x.abs().max())
    assert 240 < got.amax * got.scale <= 464
    assert got.saturated == 0


def test_non_finite_values_stay_visible():
    x = torch.tensor([[1.0, torch.inf], [torch.nan, 2.0]])
    got = health(x, quantize_tensor(x, torch.tensor(1.0), E4M3))
    assert math.isnan(got.sqnr_db)
    assert math.isinf(got.amax)


@pytest.mark.parametrize("size", [1.0, 1e-25])
@pytest.mark.parametrize("kind", ["tensor", "block", "mx"])
def test_a_sample_of_a_large_operand_is_near_the_whole(kind, size):
    torch.manual_seed(0)
    x = torch.randn(12 * SAMPLE, 256) * (1 + torch.arange(12 * SAMPLE) % 7)[:, None] * size
    got = health(x, quantised(x, kind))
    wide, q = x.double(), quantised(x, kind)
    error = wide - q.data.double() * q.expanded(q.scale_inv).double()
    assert got.sqnr_db == pytest.approx(20 * math.log10(float(wide.norm() / error.norm())), abs=0.5)
    assert got.flushed == pytest.approx(float((q.data.float().eq(0) & x.ne(0)).double().mean()), abs=2e-3)


def test_the_row_with_the_largest_value_is_always_measured():
    x = torch.randn(8 * SAMPLE, 32)
    x[777, 5] = 1e4
    assert health(x, quantize_tensor(x, torch.tensor(1.0), E4M3)).saturated == pytest.approx(1 / x.numel())
    x[777, 5] = torch.nan
    assert math.isnan(health(x, quantize_tensor(x, torch.tensor(1.0), E4M3)).sqnr_db)


def test_an_operand_of_zeros_has_lost_nothing():
    zeros = torch.zeros(300, 16, dtype=torch.bfloat16)
    got = health(zeros, quantised(zeros, "tensor"))
    assert (got.saturated, got.flushed, got.sqnr_db) == (0, 0, math.inf)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_a_recompute_is_not_measured_again(recipe):
    found = []
    for checkpointed in (False, True):
        model = build_llama(intermediate_size=128, hidden_size=128)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        apply_fp8(model, recipe=recipe)
        probe = HealthProbe(model.train(), lambda f: f)
        probe.attach()
        torch.manual_seed(0)
        model(input_ids=torch.randint(0, 64, (2, 16))).logits.square().mean().backward()
        probe.detach()
        found.append(probe.collect())
    assert found[0] == found[1]


def by_name(path):
    tables = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if line["kind"] == "table":
            tables.setdefault(line["name"], []).append(line)
    return tables


@pytest.mark.integration
def test_the_run_logs_health_by_operand_layer_and_worst_linear(train, tmp_path):
    from foundry_fp8.algorithms.fp8 import FP8
    from foundry_fp8.callbacks.fp8_monitor import FP8Monitor

    trainer = train(
        build_llama(),
        [FP8Monitor(interval=2, worst=2, details=True)],
        algorithms=[FP8(recipe="delayed")],
        steps=6,
    )
    for operand in ("x", "w", "dy"):
        for stat in ("saturated", "flushed", "sqnr_db", "scale_age"):
            assert len(series(trainer, f"fp8/{stat}/{operand}/worst")) == 3
        for layer in (0, 1):
            assert len(series(trainer, f"fp8/sqnr_db/{operand}/layer_{layer:03d}")) == 3
        worst = series(trainer, f"fp8/sqnr_db/{operand}/worst")
        assert worst == [
            min(a, b)
            for a, b in zip(
                *(series(trainer, f"fp8/sqnr_db/{operand}/layer_00{i}") for i in (0, 1)), strict=True
            )
        ]
    table = by_name(next(tmp_path.glob("runs/*/run_log.jsonl")))["fp8_worst"][0]
    assert table["columns"] == ["operand", "linear", "amax", "scale", "saturated", "flushed", "sqnr_db"]
    assert [row[0] for row in table["rows"]] == ["x", "x", "w", "w", "dy", "dy"]
    assert all(".layers." in row[1] and len(row) == 7 for row in table["rows"])
    # After the first step the scales are the weights' own: E4M3 rounding alone gives about 31 dB.
    assert series(trainer, "fp8/sqnr_db/w/mean")[-1] == pytest.approx(31, abs=2)
    assert series(trainer, "fp8/scale_age/w/worst")[0] == 0


@pytest.mark.integration
def test_a_model_without_fp8_is_said_once(train, caplog):
    from foundry_fp8.callbacks.fp8_monitor import FP8Monitor

    trainer = train(build_llama(), [FP8Monitor(interval=1)], steps=2)
    assert not [key for key in trainer.logged.data if key.startswith("fp8")]
    assert sum("no FP8 linear" in record.getMessage() for record in caplog.records) == 1
