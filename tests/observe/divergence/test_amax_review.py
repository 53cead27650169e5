"""Amax histories that are not this run's, and passes that would poison them."""

from __future__ import annotations

import math

import pytest
import torch

from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.recipes import DelayedScaling
from foundry_fp8.observe.divergence.amax_review import AmaxReview


class Run:
    """Passes of one tensor in each format; the second one never changes."""

    def __init__(self, length=16, acts=True, fmt=E4M3, **recipe):
        self.state = DelayedScalingState(DelayedScaling(amax_history_len=length, **recipe), [fmt.max, 448.0])
        self.review = AmaxReview(self.state, acts=acts)
        self.review.attach()
        self.fmt = fmt
        self.alarms = []
        """Of all that was told, whether it is one."""

    def feed(self, *amaxes):
        told = []
        for amax in amaxes:
            self.state.slot(0).record(torch.tensor(float(amax)))
            self.state.slot(1).record(torch.tensor(2.0))
            self.state.update()
            found = self.review.collect()
            assert all(one.index == 0 for one in found)
            told.append("".join(one.kind for one in found))
            self.alarms += [one.alarms for one in found]
        assert float(self.state.scale[1]) == 224.0 * 2.0**-self.state.recipe.margin
        return told

    @property
    def holds(self):
        """The largest value that the next pass's scale holds."""
        return float(f"{self.fmt.max / float(self.state.scale[0]):.5g}")


def test_one_pass_far_above_is_kept_out_and_the_next_is_scaled_as_before():
    run = Run()
    assert run.feed(3, 4, 4e5, 4) == ["", "", "spike", ""]
    assert run.holds == 4
    assert run.feed(3, 5, 1e6, 1e6, 1e6)[2:] == ["spike", "", ""], "a second one in a row is a level"
    assert run.holds == 1e6


def test_a_history_far_above_starts_afresh_with_the_first_pass():
    run = Run()
    run.feed(3, 4)
    run.state.amax_history[1:, 0] *= 1e6
    run.state.update()
    assert run.feed(3) == ["stale"] and run.holds == 3
    assert run.feed(5, 4) == ["", ""] and run.holds == 5


def test_a_level_that_comes_back_doubles_the_passes_that_it_takes():
    """Batches with hardly a token to learn from: a small amax says nothing about the next one."""
    run = Run(length=1024)
    run.feed(100)
    assert run.feed(0.01, 100) == ["stale", ""], "the old level comes in at once"
    assert run.holds == 100
    assert run.feed(0.01, 100, 0.01, 0.01, 100) == ["", "", "", "stale", ""]
    assert run.holds == 100
    assert run.feed(*[0.01] * 3, 100, *[0.01] * 3, 100) == [""] * 8


def test_a_level_that_falls_on_is_told_and_another_runs_history_or_a_level_that_comes_back_is_not():
    """Each step is one that the format bears."""

    def alarms(*passes):
        run = Run(length=64)
        run.feed(*passes)
        return run.alarms

    assert alarms(*[100 * 0.8**i for i in range(60)])[:3] == [False, True, True]
    assert alarms(*[100] * 5, *[2] * 60) == [False], "another run's"
    assert True not in alarms(*([100] + [2] * 7) * 12)
    # What has filled its history since is a level of its own.
    assert alarms(*[100] * 5, *[2] * 80, *[0.04] * 20) == [False, False]


@pytest.mark.parametrize(("fmt", "octaves"), [(E4M3, 8.9), (E5M2, 15.9)])
def test_half_of_the_formats_octaves_is_the_limit(fmt, octaves):
    for factor in (2.0**octaves, 2.0**-octaves):
        assert Run(fmt=fmt).feed(1, factor * 0.99 if factor > 1 else factor / 0.99) == ["", ""]
        assert Run(fmt=fmt).feed(1, factor * 1.1 if factor > 1 else factor / 1.1)[1]


@pytest.mark.parametrize(("fmt", "factor", "bears"), [(E4M3, 30, 7), (E5M2, 256, 30)])
def test_a_history_that_is_not_far_above_starts_afresh_after_several_passes(fmt, factor, bears):
    """A third of the limit any pass may lack for any time; of the rest these lack a quarter to a third."""
    run = Run(length=64, fmt=fmt)
    run.feed(3, 4)
    run.state.amax_history[1:, 0] *= factor
    assert run.feed(4, 4, 4) == [""] * 3
    assert run.feed(4) == ["stale"] and run.holds == 4
    assert not any(run.feed(*[4] * 20))
    run.state.amax_history[1:, 0] *= bears
    assert not any(run.feed(*[4] * 50))


def test_what_comes_back_over_a_fresh_history_was_no_other_runs():
    run = Run(length=64)
    told = run.feed(*([100] + [4] * 7) * 12)
    assert told.count("stale") <= 2, "the wait doubles"


@pytest.mark.parametrize("margin", [0, 1])
def test_passes_above_all_that_is_remembered_are_counted_in_every_pass(margin):
    run = Run(length=5, margin=margin)
    run.feed(*[2] * 10)
    assert float(run.review.clipped[0, 0]) == 0
    counts = []
    for _ in range(6):
        run.feed(2.0 ** (2 + margin), *[2] * 5)
        counts.append(float(run.review.clipped[0, 0]))
    # Half an octave of the one that it is above what is held, each forgotten by a thirty-second a pass.
    assert counts == pytest.approx(
        [0.5 * sum((31 / 32) ** (5 + 6 * j) for j in range(i + 1)) for i in range(6)]
    )
    quiet = Run(length=5)
    quiet.feed(*[2, 2.5, 2.2, 1.8, 2.7] * 10)
    assert float(quiet.review.clipped[0, 0]) == 0


def test_one_batch_is_an_octave_at_most_and_a_spike_that_is_kept_out_none():
    run = Run(length=16)
    run.feed(*[2] * 10, 200, 2)
    assert float(run.review.clipped[0, 0]) == pytest.approx(31 / 32)
    run = Run(length=16)
    assert run.feed(*[2] * 10, 2e6)[-1] == "spike" and float(run.review.clipped[0, 0]) == 0


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_passes_that_are_kept_out_again_are_counted_and_one_is_not(fmt):
    once, rare, often = (Run(length=16, fmt=fmt) for _ in range(3))
    once.feed(*[2] * 20, 2e9, *[2] * 5)
    rare.feed(*([2] * 20 + [2e9]) * 5)
    often.feed(*([2] * 20), *([2e9] + [2] * 4) * 3)
    counts = [float(run.review.clipped[1, 0]) for run in (once, rare, often)]
    assert counts == pytest.approx([0.0, 0.0, (31 / 32) ** 9 + (31 / 32) ** 4])
    assert often.holds == 2


def test_a_fresh_history_and_a_steady_growth_are_none_of_its_business():
    assert not any(Run().feed(*[1e-9 * 4.0**i for i in range(40)]))
    assert not any(Run().feed(0, 0, 7, 0, 7))


def test_what_is_not_finite_never_comes_in():
    run = Run()
    assert run.feed(3, math.inf, math.inf, 4) == ["", "spike", "", ""]
    assert run.holds == 4 and bool(torch.isfinite(run.state.amax_history).all())


def test_a_review_that_only_tells_changes_nothing():
    told, plain = Run(acts=False), Run()
    plain.review.detach()
    passes = (3, 4, 4e5, 4, 4, 4)
    assert told.feed(*passes) == ["", "", "spike", "", "", ""]
    assert not any(plain.feed(*passes))
    assert torch.equal(told.state.amax_history, plain.state.amax_history)
    assert torch.equal(told.state.scale, plain.state.scale)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize(
    "passes",
    [
        [100 * 0.5**i for i in range(60)],
        [100] * 5 + [2] * 60,
        [100, *[0.001] * 7] * 12,
        [2] * 20 + ([2e9] + [2] * 4) * 3 + [2e9] * 3 + [2] * 80,
        [3, 0, math.inf, math.inf, 4, 0, 0, 4e9, 4],
    ],
    ids=["falls on", "another run's", "comes back", "recurring", "not finite"],
)
def test_a_review_that_only_tells_tells_what_one_that_acts_tells(fmt, passes):
    tells, acts = Run(length=64, fmt=fmt, acts=False), Run(length=64, fmt=fmt)
    told = tells.feed(*passes)
    assert told == acts.feed(*passes) and any(told)
    assert tells.alarms == acts.alarms
    assert torch.equal(tells.review.clipped[1], acts.review.clipped[1]), "kept out again"
    plain = Run(length=64, fmt=fmt)
    plain.review.detach()
    plain.feed(*passes)
    assert torch.equal(tells.state.amax_history, plain.state.amax_history)
    assert torch.equal(tells.state.scale, plain.state.scale)


def test_a_review_that_only_tells_sees_a_history_that_another_has_changed():
    run = Run(acts=False)
    assert run.feed(3, 4, 4e5, 4)[2] == "spike"
    run.state.amax_history[1:, 0] *= 1e6
    assert run.feed(3, 4) == ["stale", ""]


@pytest.mark.parametrize("nothing", [{"amax_compute_algo": "most_recent"}, {"length": 1}])
@pytest.mark.parametrize("acts", [True, False])
def test_where_nothing_is_remembered_clipped_passes_alone_are_counted(nothing, acts):
    """By a quarter of the octaves above what the pass before allows, less a half, one at most; a pass that is not finite is none."""
    run = Run(acts=acts, **nothing)
    assert run.feed(4, 5, 4, 5, 1e9, 4, 1e-9, 4)[-4:] == [""] * 4
    # 1e9 after 5, and 4 after 1e-9: each by one octave, which a pass forgets by a 32nd.
    assert float(run.review.clipped[0, 0]) == pytest.approx(0.25 * ((31 / 32) ** 3 + 1))
    run.review.forget()
    run.feed(4, 8, 4, 8, math.inf, 4)
    # 8 after 4, twice, by one octave less a half; what follows the pass that is not finite has the scale of the 8.
    assert float(run.review.clipped[0, 0]) == pytest.approx(0.125 * ((31 / 32) ** 3 + 31 / 32))
    assert float(run.review.clipped[0, 1]) == float(run.review.clipped[1, 0]) == 0
    run.feed(32, 4, 16)
    # What all tensors are judged by, gradients too: 32 after 4 by one octave above two, 16 after 4 by none.
    assert run.review.clipped[1].tolist() == pytest.approx([0.25 * (31 / 32) ** 2, 0])


def test_its_state_goes_on_where_it_was():
    first, second = Run(length=64), Run(length=64)
    first.feed(100, 0.01, 100)
    second.state.scale.copy_(first.state.scale)
    second.state.amax_history.copy_(first.state.amax_history)
    assert second.review.load_state_dict(first.review.state_dict()) == []
    assert second.feed(0.01, 0.01) == first.feed(0.01, 0.01) == ["", "stale"]


def test_what_an_older_or_a_newer_one_saved_is_taken_as_far_as_both_have_it():
    first = Run(length=64)
    first.feed(100, 0.01, 100)
    saved = first.review.state_dict()
    older = {name: saved[name] for name in saved if name not in ("since", "recurring", "left_out")}
    for acts, missing in ((True, ["recurring", "since"]), (False, ["left_out", "recurring", "since"])):
        review = Run(length=64, acts=acts).review
        fresh = review.state_dict()
        assert review.load_state_dict(older) == missing
        both = {name: values for name, values in review.state_dict().items() if name in older}
        assert both == older != {name: fresh[name] for name in older}
        assert all(review.state_dict()[name] == fresh[name] for name in missing)
    review = Run(length=64).review
    assert review.load_state_dict({**saved, "later": [1]}) == ["later"] and review.state_dict() == saved
    assert "low" in review.load_state_dict({**saved, "low": [1.0, 2.0, 3.0]})  # of another model
    assert review.state_dict() == saved


def test_the_state_of_one_that_only_tells_goes_on_where_it_was():
    """Which passes are left out of the histories is a part of it; what acted before has left none in."""
    first, second, acted = Run(length=64, acts=False), Run(length=64, acts=False), Run(length=64)
    first.feed(*[2] * 5, 2e6, 2)
    acted.feed(*[2] * 5, 2e6, 2)
    for before in (first, acted):
        second.state.scale.copy_(before.state.scale)
        second.state.amax_history.copy_(before.state.amax_history)
        second.review.load_state_dict(before.review.state_dict())
        after = Run(length=64, acts=False)
        after.state.amax_history.copy_(before.state.amax_history)
        after.review.load_state_dict(second.review.state_dict())
        assert after.feed(2, 3e6, 2) == ["", "spike", ""]
        assert float(after.review.clipped[1, 0]) > 0.9, "kept out again"
