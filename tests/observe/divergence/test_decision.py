"""What is demoted for what, and when it comes back; no model."""

from __future__ import annotations

import math

import pytest
import torch

from foundry_fp8.observe.divergence.decision import WITHIN, Decision
from foundry_fp8.observe.divergence.loss_watch import HORIZON
from foundry_fp8.observe.divergence.observed import Observed, Rungs

RECIPES = ("delayed", "current", "high_precision")
NAMES = ["b0.q", "b0.o", "b1.q", "b1.o"]


class Run:
    """A decision fed with what a test changes; everything else is healthy."""

    def __init__(self, quiet=5, acts=True):
        targets = {name: Rungs(unit=f"layer_00{name[1]}", recipes=RECIPES) for name in NAMES}
        self.decision = Decision(targets, quiet=quiet, acts=acts)
        self.batch = 0
        self.events = []

    def feed(self, times=1, *, due=True, loss=2.0, flushed=None, shadow=None, signs=None):
        flushed, shadow = flushed or {}, {} if shadow is None else shadow
        found = []
        for _ in range(times):
            self.batch += 1
            rungs = self.decision.rungs
            damage = {
                (name, "x", "flushed"): flushed.get(name, 0.001)
                for name in NAMES
                if rungs[name] < len(RECIPES) - 1
            }
            shadows = {
                (name, "x", "flushed"): shadow.get(name, 0.001)
                for name in NAMES
                if rungs[name] and shadow.get(name, 0) is not None
            }
            seen = Observed(
                loss=loss(self.batch) if callable(loss) else loss,
                signs={("layer_000", "kurtosis"): 10.0, ("layer_001", "kurtosis"): 10.0} | (signs or {}),
                damage=damage,
                shadow=shadows,
            )
            found += self.decision.decide(self.batch, seen, due=due)
        self.events += found
        return found


def moves(events):
    return [(e.unit, e.action, e.signal) for e in events if e.action in ("demote", "promote")]


def test_the_sick_linear_is_demoted_rung_by_rung_and_its_neighbours_stay():
    run = Run()
    assert not run.feed(20)
    found = run.feed(4, flushed={"b1.o": 0.4})
    assert moves(found) == [("b1.o", "demote", "delayed -> current"), ("b1.o", "demote", "current -> high_precision")]  # fmt: skip
    assert [e.signal for e in found if e.action == "alarm"] == ["flushed of x"] * 2
    assert run.decision.rungs == dict.fromkeys(NAMES, 0) | {"b1.o": 2}


def test_it_is_never_promoted_while_its_shadow_is_sick_and_is_once_that_is_healthy():
    run = Run(quiet=5)
    run.feed(20)
    run.feed(4, flushed={"b1.o": 0.8})
    assert not run.feed(200, shadow={"b1.o": 0.8})
    assert not run.feed(4)
    assert moves(run.feed(1)) == [("b1.o", "promote", "high_precision -> current")]
    assert moves(run.feed(5)) == [("b1.o", "promote", "current -> delayed")]


def test_a_shadow_that_is_sick_now_and_then_or_not_measured_does_not_promote():
    run = Run(quiet=5)
    run.feed(20)
    run.feed(4, flushed={"b1.o": 0.8})
    for _ in range(20):
        assert not run.feed(4)
        assert not run.feed(1, shadow={"b1.o": 0.8})
    assert not run.feed(50, shadow={"b1.o": None})


def test_each_relapse_doubles_the_patience():
    run = Run(quiet=3)
    run.feed(20)
    waits = []
    for _ in range(4):
        run.feed(2, flushed={"b0.q": 0.4})
        began = run.batch
        while run.decision.rungs["b0.q"]:
            run.feed()
        waits.append(run.batch - began)
    assert waits == [3, 6, 12, 24]


def test_harder_data_is_one_alarm_and_no_demotion():
    run = Run()
    run.feed(60)
    found = run.feed(300, loss=lambda batch: 2.7 + 0.02 * (batch % 3))
    assert [(e.unit, e.action) for e in found] == [("model", "alarm")]
    assert "no operand is damaged" in str(found[0])


@pytest.mark.parametrize("signs", [{}, {("layer_001", "kurtosis"): 100.0}])
def test_a_loss_that_climbs_on_demotes_the_blocks_that_gave_a_sign_or_all(signs):
    run = Run()
    run.feed(60)
    run.feed(4, signs=signs)
    found = run.feed(20, loss=lambda batch: 2.0 * 1.06 ** (batch - 64))
    assert moves(found)
    expected = {"b1.q", "b1.o"} if signs else set(NAMES)
    first = next(e.batch for e in found if e.action == "demote")
    assert {e.unit for e in found if e.action == "demote" and e.batch == first} == expected
    assert len([e for e in found if e.unit == "model" and e.batch <= first]) == 2, "the second alarm acts"


@pytest.mark.parametrize("noise", [0.0, 0.04])
@pytest.mark.parametrize("stairs", [(60, 110), (60, 90, 120), (60, 75)])
def test_data_that_become_harder_twice_are_no_climb(stairs, noise):
    run = Run()
    generator = torch.Generator().manual_seed(3)

    def loss(batch):
        level = 2.0 * 1.4 ** sum(batch > stair for stair in stairs)
        return level * float(torch.exp(noise * torch.randn((), generator=generator)))

    found = run.feed(200, loss=loss)
    assert len([e for e in found if e.unit == "model"]) == len(stairs)
    assert not moves(found)


def test_a_finer_rung_that_is_not_healthy_is_left_for_the_next_one():
    """Below what would demote by itself, and not what a layer was demoted for."""
    run = Run()
    run.feed(20)
    run.feed(2, flushed={"b1.o": 0.4})
    assert run.decision.rungs["b1.o"] == 1
    found = run.feed(3, flushed={"b1.o": 0.015})
    assert moves(found) == [("b1.o", "demote", "current -> high_precision")] and run.batch == 25


def test_a_finer_rung_on_which_the_loss_stays_up_is_left_for_the_next_one():
    run = Run()
    run.feed(60)
    run.feed(2, flushed={"b1.o": 0.4})
    assert moves(run.feed(1, loss=4.0)) == []
    found = run.feed(1, loss=4.0, flushed={"b1.o": 0.6})
    assert moves(found) == [("b1.o", "demote", "current -> high_precision")]
    run.feed(1)
    assert not run.decision.look_again, "what the old rung left is no doubt about the new one"


def test_where_one_look_decides_the_next_batch_is_looked_at_out_of_turn():
    run = Run(quiet=50)
    run.feed(20)
    assert not run.decision.look_again
    assert not run.feed(flushed={"b1.o": 0.6}) and run.decision.look_again
    found = run.feed(flushed={"b1.o": 0.6, "b0.q": 0.3}, due=False)
    assert moves(found) == [("b1.o", "demote", "delayed -> current")], "what was not in doubt is not judged"
    looks = 0
    while run.decision.look_again:
        looks += 1
        assert not run.feed(due=False)
    assert looks == 3, "the new rung is on trial"
    run.feed(flushed={"b0.o": 0.6})
    assert not run.feed(due=False) and not moves(run.feed(5)), "it was one bad batch"


def test_what_is_sick_whatever_its_past_needs_no_second_look_of_its_own():
    """Two batches in a row were sick; that each layer was looked at in one of them only is the guard's economy."""
    run = Run()
    run.feed(20)
    run.decision.pulse(run.batch, {("b0.q", "x", "flushed"): 0.9})
    assert run.decision.look_again
    found = run.feed(flushed=dict.fromkeys(NAMES, 0.9), due=False)
    assert {m[:2] for m in moves(found)} == {(name, "demote") for name in NAMES}


def test_a_pulse_only_asks_for_a_look():
    run = Run()
    run.feed(20)
    run.decision.pulse(run.batch, {("b0.q", "x", "flushed"): 0.4})
    assert not run.decision.look_again, "what is above its own past only waits for its turn"
    run.decision.pulse(run.batch, {("b0.q", "x", "flushed"): 0.9})
    assert run.decision.look_again and not run.feed(WITHIN, due=False) and not run.decision.look_again
    assert not moves(run.feed(5)), "it was one bad batch"


@pytest.mark.parametrize("every", [2, 3, WITHIN])
def test_what_is_sick_in_every_few_batches_is_met_again_because_all_are_looked_at_after_one(every):
    run = Run()
    run.feed(20)
    for _ in range(every):
        assert not moves(run.events)
        sick = run.batch % every == 20 % every
        run.feed(due=sick, flushed={"b1.o": 0.9} if sick else None)
        assert run.decision.look_again
    assert moves(run.feed(due=False, flushed={"b1.o": 0.9})) == [("b1.o", "demote", "delayed -> current")]


def test_what_is_sick_in_the_first_batches_of_a_run_is_met_again_in_any_run():
    run = Run()
    for _ in range(2):
        run.feed(flushed={"b1.o": 0.9})
        run.feed(2)
    assert not moves(run.events)


def test_a_young_run_is_in_transit_and_what_is_sick_in_it_has_to_last():
    """Weights that begin as zeros have rows that are alike in the first steps, in any run."""
    run = Run()
    for _ in range(2):
        assert not run.feed(2, flushed={"b1.o": 0.9}) and not run.feed(3, due=False, flushed={"b1.o": 0.9})
        run.feed(1)
    assert not run.events and run.decision.young
    run.decision.pulse(run.batch, {("b1.o", "x", "flushed"): 0.9})
    run.feed(1)
    assert not run.feed(1, flushed={"b1.o": 0.9}) and not run.decision.young
    assert moves(run.feed(1, flushed={"b1.o": 0.9})) == [("b1.o", "demote", "delayed -> current")]


def test_a_model_that_is_sick_from_the_start_on_does_not_wait_until_the_run_is_old():
    run = Run()
    assert not run.feed(2, flushed={"b1.o": 0.9})
    assert moves(run.feed(1, flushed={"b1.o": 0.9})) == [("b1.o", "demote", "delayed -> current")]


def test_passes_that_a_young_run_clips_are_its_warm_up():
    run = Run()
    for clipped, events in ([5.0] * 7, 0), ([5.0], 2):
        for value in clipped:
            run.batch += 1
            seen = Observed(loss=2.0, signs={}, damage={("b0.q", "x", "clipped"): value}, shadow={})
            assert len(run.decision.decide(run.batch, seen)) == events


def test_what_is_sick_more_rarely_is_two_bad_batches():
    run = Run()
    run.feed(20)
    for _ in range(5):
        run.feed(flushed={"b1.o": 0.9})
        run.feed(WITHIN)
    assert not run.events and not run.decision.look_again


@pytest.mark.parametrize(
    ("operand", "which"),
    [("x", "y"), ("x", "dw"), ("dy", "dx"), ("w", "y"), ("q", "qk"), ("k", "qk"), ("v", "o")],
)
def test_what_an_operand_loses_demotes_where_its_products_lose_too(operand, which):
    """Half of the way to an alarm of their own is enough."""

    def moved(product):
        run = Run()

        def feed(times, lost, product):
            found = []
            for _ in range(times):
                run.batch += 1
                damage = {("b1.o", operand, "noise"): lost}
                damage |= {("b1.o", name, "product_noise"): 1.0 for name in ("y", "dx", "dw", "o")}
                signal, unit = ("logit_noise", 0.02) if which == "qk" else ("product_noise", 1.0)
                damage["b1.o", which, signal] = product * unit
                found += run.decision.decide(
                    run.batch, Observed(loss=2.0, signs={}, damage=damage, shadow={})
                )
            return found

        assert not feed(20, 1.0, 1.0)
        return feed(4, 30.0, product)

    (told,) = moved(1.5)
    assert (told.action, told.signal) == (
        "alarm",
        f"noise of {operand}",
    ) and "its products are well" in told.detail
    assert [event.action for event in moved(3.0)][:2] == ["alarm", "demote"]


def test_what_is_clipped_now_and_then_goes_to_high_precision_and_stays_while_it_would_be_clipped():
    run = Run(quiet=3)

    def feed(times, clipped):
        found = []
        for _ in range(times):
            run.batch += 1
            rung = run.decision.rungs["b0.q"]
            seen = {("b0.q", "x", "clipped"): clipped}
            others = {("b0.q", "x", "flushed"): 0.001}
            shadow = {**seen, **others} if rung else {}
            damage = {**others, **({} if rung else seen)}
            observed = Observed(loss=2.0, signs={}, damage=damage if rung < 2 else {}, shadow=shadow)
            found += run.decision.decide(run.batch, observed)
        return moves(found)

    assert not feed(20, 0.2)
    assert feed(3, 2.0) == [("b0.q", "demote", "delayed -> high_precision")]
    assert not feed(50, 2.0)
    assert feed(6, 0.2) == [
        ("b0.q", "promote", "high_precision -> current"),
        ("b0.q", "promote", "current -> delayed"),
    ]


def test_a_shadow_without_the_operand_that_was_sick_promotes_nothing():
    run = Run(quiet=3)

    def feed(times, gradient):
        """``gradient``: None where it is not measured."""
        for _ in range(times):
            run.batch += 1
            where = {("b0.q", "x", "flushed"): 0.001}
            if gradient is not None:
                where["b0.q", "dy", "flushed_gradient"] = gradient
            rung = run.decision.rungs["b0.q"]
            seen = Observed(
                loss=2.0, signs={}, damage=where if rung < 2 else {}, shadow=where if rung else {}
            )
            run.events += run.decision.decide(run.batch, seen)
        return run.decision.rungs["b0.q"]

    assert feed(20, 0.01) == 0 and feed(5, 0.9) == 2
    assert feed(20, None) == 2 and feed(2, 0.01) == 2 and feed(1, 0.01) == 1


def test_what_the_loss_demoted_without_damage_stays_away_four_times_as_long():
    run = Run(quiet=5)
    run.feed(60)
    while not any(run.decision.rungs.values()):
        run.feed(1, loss=lambda batch: 2.0 * 1.1 ** (batch - 60))
    level = 2.0 * 1.1 ** (run.batch - 60)
    assert {m[2] for m in moves(run.feed(1, loss=level))} == {"current -> high_precision"}, "it did not help"
    assert not moves(run.feed(19))
    assert {m[1] for m in moves(run.feed(3))} == {"promote"}


def test_what_left_a_rung_because_the_loss_stayed_up_does_not_come_back_while_it_is_up():
    run = Run(quiet=3)
    run.feed(60)
    while run.decision.rungs["b1.o"] < 2:  # half damaged, and on the finer rung the loss stays up
        run.feed(1, loss=4.0, flushed={"b1.o": 0.018})
    assert "the loss is 4 on current" in run.events[-1].why
    # Every shadow is healthy, and no further alarm comes.
    assert not moves(run.feed(HORIZON - 5, loss=4.0))
    assert not moves(run.feed(2))
    assert moves(run.feed(1)) == [("b1.o", "promote", "high_precision -> current")]


def test_a_loss_that_is_up_for_good_keeps_nothing_away_for_good():
    run = Run(quiet=3)
    run.feed(60)
    run.feed(3, flushed={"b1.o": 0.8})
    assert {m[1] for m in moves(run.feed(HORIZON, loss=4.0))} == {"demote"}
    assert {m[1] for m in moves(run.feed(30, loss=4.0))} == {"promote"}


def test_a_shadow_of_what_never_ran_is_held_to_what_ran():
    """Whatever would be told of the recipe that is configured is not healthy on a finer one, where nothing has been learned of it."""
    targets = {"b0.q": Rungs(unit="layer_000", recipes=RECIPES)}
    decision = Decision(targets, quiet=3)
    where = ("b0.q", "dy", "flushed_gradient")
    for batch in range(20):
        seen = Observed(loss=2.0, signs={}, damage={where: 0.01}, shadow={})
        assert not decision.decide(batch, seen)
    clipped = {where: 0.01, ("b0.q", "x", "clipped"): 3.0}  # straight to high precision
    decision.decide(21, Observed(loss=2.0, signs={}, damage=clipped, shadow={}))
    assert decision.recipe("b0.q") == "high_precision"
    sick = Observed(loss=2.0, signs={}, damage={}, shadow={where: 0.2, ("b0.q", "x", "clipped"): 0.0})
    assert decision.rungs["b0.q"] == 2
    for batch in range(22, 122):
        assert not decision.decide(batch, sick), "0.2 is an alarm where 0.01 is the level"


def test_one_bad_batch_demotes_nothing_and_a_second_one_does():
    run = Run()
    run.feed(30)
    assert [e.action for e in run.feed(1, loss=math.nan)] == ["alarm"]
    assert not run.feed(20)
    assert not moves(run.feed(1, loss=math.nan))
    assert {m[0] for m in moves(run.feed(1, loss=math.nan))} == set(NAMES)
    found = run.feed(100, loss=math.nan)
    assert len(found) < 10, "it is told, and not in every observation"
    assert {m[1] for m in moves(found)} == {"demote"}, "nothing comes back while the loss is not finite"


def test_a_guard_that_only_warns_tells_damage_once():
    run = Run(acts=False)
    run.feed(20)
    found = run.feed(300, flushed={"b1.o": 0.4})
    assert [(e.unit, e.action) for e in found] == [("b1.o", "alarm")]
    run.feed(20)
    assert len(run.feed(20, flushed={"b1.o": 0.4})) == 1


def test_a_spike_in_every_sign_at_once_moves_nothing():
    run = Run()
    run.feed(60)
    found = run.feed(2, loss=8.0, signs={("layer_000", "kurtosis"): 900.0, ("layer_001", "kurtosis"): 900.0})
    assert not moves(found + run.feed(HORIZON))


def test_its_state_goes_on_where_it_was():
    straight, first = Run(quiet=4), Run(quiet=4)
    for run in (straight, first):
        run.feed(20)
        run.feed(3, flushed={"b1.o": 0.8})
    resumed = Run(quiet=4)
    assert resumed.decision.load_state_dict(first.decision.state_dict()) == ([], [])
    resumed.batch = first.batch
    for run in (straight, resumed):
        run.feed(1, flushed={"b1.o": 0.8})
        run.feed(30)
        run.feed(5, flushed={"b1.o": 0.8, "b0.q": 0.3}, loss=3.0)
    assert moves(resumed.events) == moves(straight.events)[-len(moves(resumed.events)) :]
    assert resumed.decision.state_dict() == straight.decision.state_dict()


def test_a_target_whose_rung_is_gone_goes_on_below_what_is_configured():
    run = Run()
    run.feed(20)
    run.feed(2, flushed={"b1.o": 0.8})
    other = Decision({name: Rungs(unit="u", recipes=("delayed", "high_precision")) for name in NAMES}, quiet=5)  # fmt: skip
    said = other.load_state_dict(run.decision.state_dict())
    assert said == (["b1.o ran current, now high_precision"], [])
    assert other.rungs == dict.fromkeys(NAMES, 0) | {"b1.o": 1}


def test_what_an_older_one_did_not_save_starts_anew_and_is_named():
    run = Run()
    run.feed(20)
    run.feed(2, flushed={"b1.o": 0.8})
    saved = run.decision.state_dict()
    assert saved["rungs"]["b1.o"][0] == 1
    del saved["trial"]
    del saved["loss"]["calm"]
    for of_signal in saved["signals"].values():
        del of_signal["slow"]
    saved["signals"]["b1.o/x/retired/delayed"] = saved["signals"]["b1.o/x/flushed/delayed"]
    found = Run().decision
    said, differs = found.load_state_dict(saved)
    assert not said and differs == ["trial", "signals/retired", "signals/slow", "loss/calm"]
    assert found.rungs["b1.o"] == 1 and found.state_dict()["count"] == saved["count"]
    assert found.state_dict()["signals"]["b1.o/x/flushed/delayed"]["seen"] == 0
