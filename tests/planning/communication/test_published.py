"""Published throughput over GPUs: how wrong the model is, and that it is better than guessing that nothing slows down."""

import dataclasses

from foundry_fp8.planning.communication import published
from foundry_fp8.planning.communication.published import check_published, skill


def test_published_points_are_predicted_with_the_errors_that_the_docs_state():
    checks = check_published()
    found = skill(checks)
    assert found.tests == 52
    off = {(c.series, c.gpus): c.error_percent for c in checks if abs(c.error_percent) >= 10}
    assert set(off) == {("AWS 7B BF16", 256)} and off["AWS 7B BF16", 256] < 13
    assert found.score > 0.6 and found.rms < 4 and 6 < found.unslowed_rms < 6.5
    assert all(abs(c.error_percent) < 1e-3 for c in checks if c.baseline)


def test_the_skill_is_that_of_the_stated_effects(monkeypatch):
    """Without them hardly any is left: the sources' constants carry it, not the fit of each series' first point."""
    points = [
        dataclasses.replace(
            point, network=dataclasses.replace(point.network, overlap_slowdown=0.0, gpu_spread=0.0)
        )
        for point in published.published()
    ]
    monkeypatch.setattr(published, "published", lambda: points)
    assert skill(check_published()).score < 0.2
