"""Published throughput over GPUs: how wrong the model is, and that it is better than guessing that nothing slows down."""

import dataclasses

import pytest

from foundry_fp8.planning.communication import published
from foundry_fp8.planning.communication.published import check_published, skill


def test_published_points_are_predicted_with_the_errors_that_the_docs_state():
    checks = check_published()
    found = skill(checks)
    assert found.tests == 52
    assert found.largest < 8.5 and found.largest == max(abs(c.error_percent) for c in checks)
    assert found.score > 0.75 and found.rms < 3.0 and 6 < found.unslowed_rms < 6.5
    assert all(abs(c.error_percent) < 1e-3 for c in checks if c.baseline)


def test_the_skill_is_that_of_the_stated_effects(monkeypatch):
    """Without them hardly any is left: the sources' constants carry it, not the fit of each series' first point."""
    points = [
        dataclasses.replace(
            point,
            network=dataclasses.replace(
                point.network, overlap_slowdown=0.0, gpu_spread=0.0, straggler_share=0.0
            ),
        )
        for point in published.published()
    ]
    monkeypatch.setattr(published, "published", lambda: points)
    assert skill(check_published()).score < 0.2


def test_a_small_model_in_fp8_is_worse_predicted_if_nothing_waits_for_its_host(monkeypatch):
    one = next(point for point in published.published() if point.larger)
    checks = _checks(monkeypatch, [dataclasses.replace(one, larger="")])
    assert min(check.error_percent for check in checks) == pytest.approx(-12.0, abs=0.05)
    assert "-3.3 to -12.0 %" in one.assumed


def test_nothing_but_smallest_sizes_enters_a_prediction(monkeypatch):
    seen = {(c.series, c.gpus): c.predicted for c in check_published()}
    blinded = [
        dataclasses.replace(
            p, measured={n: v if n == min(p.measured) else 1.0 for n, v in p.measured.items()}
        )
        for p in published.published()
    ]
    assert {(c.series, c.gpus): c.predicted for c in _checks(monkeypatch, blinded)} == seen


def test_the_host_is_as_long_as_what_was_published_on_the_smallest_size(monkeypatch):
    """By hand: in BF16 the step takes 203.8 ms, FP8 computes 7B in 1/1.18 of its time, so the GPU needs 173 of the 200.8 ms."""
    eight = next(c for c in check_published() if (c.series, c.gpus) == ("AWS 1B FP8", 8))
    assert eight.predicted == pytest.approx(40800, rel=1e-6)
    thirty_two = next(c for c in check_published() if (c.series, c.gpus) == ("AWS 1B FP8", 32))
    assert thirty_two.predicted == pytest.approx(40800, rel=1e-6)  # the GPU's 179 ms hide behind the host


def _checks(monkeypatch, points):
    monkeypatch.setattr(published, "published", lambda: points)
    return check_published()
