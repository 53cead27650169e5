import json
from pathlib import Path

import numpy as np
import pytest

from foundry_fp8.report.comparison import COLUMNS, compare, format_row
from foundry_fp8.report.judgement import noise_band
from foundry_fp8.report.runs import read_runs
from tests.report.logs import END, batches, header, write_log

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def runs(sigma, steps, rng):
    """Two of one trend, each with noise of its own."""
    trend = 2 + 4 * np.exp(-np.arange(steps) / (steps / 4))
    return trend * (1 + rng.normal(0, sigma, (2, steps)))


@pytest.mark.parametrize(("sigma", "steps"), [(0.01, 1000), (0.03, 1000), (0.01, 200)])
def test_two_runs_that_differ_by_noise_stay_within_the_band_in_95_of_100(sigma, steps):
    rng = np.random.default_rng(0)
    window, inside, bands = steps // 10, 0, []
    for _ in range(600):
        here, there = runs(sigma, steps, rng)
        bands.append(noise_band(there, window))
        inside += abs(100 * (here[-window:].mean() / there[-window:].mean() - 1)) <= bands[-1]
    # Binomial: 0.9545 with a standard deviation of 0.0085; an estimate of sigma that scatters takes off up to 0.02.
    assert 0.91 < inside / 600 < 0.98
    assert np.mean(bands) == pytest.approx(100 * 2 * sigma * np.sqrt(2 / window), rel=0.05)


def test_neither_a_trend_nor_a_spike_is_noise():
    steps = np.arange(200.0)
    assert noise_band(5 - steps / 100, 20) == pytest.approx(0, abs=1e-10)
    assert noise_band(2 + 3 * np.exp(-steps / 40), 20) < 0.02
    rng = np.random.default_rng(1)
    losses = 2 * (1 + rng.normal(0, 0.01, 200))
    spiked = losses.copy()
    spiked[150] = 50
    assert noise_band(spiked, 20) < 1.3 * noise_band(losses, 20)


def test_a_longer_window_has_less_noise():
    losses = 2 * (1 + np.random.default_rng(2).normal(0, 0.01, 400))
    assert noise_band(losses, 40) == pytest.approx(noise_band(losses, 10) / 2)


def leads(folder, losses, kurtosis):
    """The column of a run beside its baseline: of each the losses, and by step the kurtosis of some layers."""
    for (name, recipe), one, measured in zip(
        (("fp32", None), ("fp8", "delayed")), losses, kurtosis, strict=True
    ):

        def metrics(step, measured=measured):
            return {f"kurtosis/residual/layer_{i:03d}": x for i, x in enumerate(measured.get(step, []))}

        write_log(
            folder / name / "run_log.jsonl", [header(name, recipe), *batches(one, metrics=metrics), END]
        )
    _, row = compare(read_runs([folder]))
    return format_row(row)[COLUMNS.index("Kurtosis leads")]


@pytest.mark.parametrize(
    ("rises", "says"),
    [(12, "+19"), (30, "+1"), (40, "-9"), (None, "–")],
    ids=["before", "with it", "after", "never"],
)
def test_kurtosis_leads_the_loss_by_so_many_batches(tmp_path, rises, says):
    losses = [2.0] * 50, [2.0] * 30 + [float("nan")] * 20
    usual = {step: [3.0, 5.0] for step in range(1, 51)}
    peak = {5: [3.0, 80.0]}  # goes back into the range, so it warns of nothing
    risen = {step: [3.0, 10.5] for step in range(rises or 51, 51)}
    assert leads(tmp_path, losses, (usual, usual | peak | risen)) == says


def test_kurtosis_of_a_run_that_did_not_diverge_leads_nothing(tmp_path):
    usual, risen = ({step: [value] for step in range(1, 51)} for value in (3.0, 30.0))
    assert leads(tmp_path, ([2.0] * 50, [2.0] * 50), (usual, risen)) == "–"


@pytest.mark.parametrize("precision", ["fp8", "fp8dpa"])
def test_kurtosis_did_not_lead_where_op1_diverged(tmp_path, precision):
    """docs/fog.md says so of the runs in benchmarks/results."""
    stored = json.loads((RESULTS / "fog_stability_default.json").read_text())["runs"]
    found = [
        next(r for r in stored if (r["variant"], r["setting"], r["precision"]) == ("op1", "large lr", one))
        for one in ("fp32", precision)
    ]
    kurtosis = [{m["step"]: m["kurtosis_token"] for m in run["measured"] if m["step"]} for run in found]
    assert leads(tmp_path, [run["losses"] for run in found], kurtosis) == "\u2013"
