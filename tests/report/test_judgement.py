import numpy as np
import pytest

from foundry_fp8.report.judgement import noise_band


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
