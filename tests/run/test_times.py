"""Rules with ``from`` and ``until``: a run that follows them is, bit for bit, one put together by hand, and resumes from anywhere."""

from __future__ import annotations

import dataclasses
import io
import os
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import foundry_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling, NVFP4Scaling
from foundry_fp8.run.settings import Run
from foundry_fp8.surgery.fp8_config import FP8Config
from foundry_fp8.surgery.timing import Moment, clocks, length_of, parse_moment
from tests.callbacks.conftest import build_llama
from tests.integrations.test_training_state import STRICT, same
from tests.observe.test_precision_probe import loss_of, tokens
from tests.surgery.test_policy import Model

HIGH = "high_precision"
STEPS = 8
WARM = [{"until": 3, "recipe": HIGH}, {"from": "0.75dur", "recipe": "current"}, {"recipe": "delayed"}]
"""High precision, delayed scaling from step 3 on, current scaling from step 6 on."""
DECAY = [
    {"until": "2ba", "recipe": "nvfp4", "gemms": {"fprop": HIGH, "wgrad": HIGH}},
    {"from": "5ba", "roles": ["mlp"], "recipe": "nvfp4", "gemms": {"dgrad": "dequantized"}},
    {"recipe": "nvfp4"},
]


def layers_of(model):
    return FP8State.of(model).modules


def warm_by_hand(model, step):
    """What ``WARM`` says, of a model that was converted to delayed scaling."""
    recipe = None if step < 3 else CurrentScaling() if step >= 6 else DelayedScaling()
    for layer in layers_of(model).values():
        layer.set_recipe(recipe)


def decay_by_hand(model, step):
    for name, layer in layers_of(model).items():
        first, last = step < 2, step >= 5 and ("mlp" in name or name.endswith(("up", "down")))
        layer.fprop = layer.wgrad = HIGH if first else "fp8"
        layer.dgrad = "dequantized" if last else "fp8"


RUNS = {"warm": (WARM, "delayed", warm_by_hand), "decay": (DECAY, "nvfp4", decay_by_hand)}
every_run = pytest.mark.parametrize(
    ("rules", "constant", "by_hand"),
    [
        pytest.param(*run, marks=pytest.mark.full if name == "warm" else (), id=name)
        for name, run in RUNS.items()
    ],
)
"""``warm`` by default under Trainer."""


class Loop:
    """A plain loop, with two microbatches a step; ``by_hand(model, step)`` sets what runs before each."""

    def __init__(self, recipe, by_hand=None, recompute=False, **options):
        torch.manual_seed(0)
        self.model = build_llama().train()
        self.by_hand, self.recompute = by_hand, recompute
        self.run = foundry_fp8.FP8Run(recipe=recipe, backend="emulated", steps=STEPS, **options)
        self.run.convert(self.model, precision="fp32")
        self.run.start(self.model, loss_of)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.ran, self.said, self.states = [], [], {}

    def loss(self, batch):
        return (
            checkpoint(loss_of, self.model, batch, use_reentrant=False)
            if self.recompute
            else loss_of(self.model, batch)
        )

    def train(self, end):
        while self.run.step < end:
            batches = [tokens(seed=2 * self.run.step + i) for i in range(2)]
            self.optimizer.zero_grad()
            if self.by_hand is not None:
                self.by_hand(self.model, self.run.step)
            self.run.begin_step(batches[0])
            self.said += [self.run.switched] * bool(self.run.switched)
            self.ran.append({one.recipe and one.recipe.name for one in layers_of(self.model).values()})
            for batch in batches:
                loss = self.loss(batch)
                loss.backward()
            self.optimizer.step()
            self.run.end_step(loss.detach())
            parts, file = (self.model, self.optimizer, self.run), io.BytesIO()
            torch.save([part.state_dict() for part in parts], file)
            self.states[self.run.step] = file
        return self

    def saved(self, step):
        self.states[step].seek(0)
        return torch.load(self.states[step], weights_only=True)

    def load(self, saved):
        for part, state in zip((self.model, self.optimizer, self.run), saved, strict=True):
            part.load_state_dict(state)
        return self


@every_run
@pytest.mark.parametrize(
    "recompute", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "recompute"]
)
def test_a_run_by_times_is_the_one_by_hand(rules, constant, by_hand, recompute, capsys):
    ours = Loop(rules, recompute=recompute).train(STEPS)
    said = capsys.readouterr().err
    theirs = Loop(constant, by_hand, announce=False).train(STEPS)
    assert same(ours.model.state_dict(), theirs.model.state_dict()) and ours.ran == theirs.ran
    assert len(ours.said) == 2 and all(said.count(one) == 1 for one in ours.said)
    if not recompute:
        constantly = Loop(constant, announce=False).train(STEPS)
        assert not same(constantly.model.state_dict(), ours.model.state_dict())


@every_run
@pytest.mark.parametrize("moments", [(2, 3, 7), pytest.param((1, 5, 6), marks=pytest.mark.full)], ids=str)
def test_it_resumes_bit_for_bit_before_at_and_after_a_switch(rules, constant, by_hand, moments):
    whole = Loop(rules, announce=False).train(STEPS)
    for at in moments:
        resumed = Loop(rules, announce=False).load(whole.saved(at)).train(STEPS)
        assert same(whole.model.state_dict(), resumed.model.state_dict()), at
        assert same(whole.run.state_dict(), resumed.run.state_dict()), at
        assert resumed.said == [said for said in whole.said if int(re.search(r"step (\d+)", said)[1]) >= at]


BACK = [{"from": 4, "until": 6, "recipe": HIGH}, {"recipe": "delayed"}]


@pytest.mark.full
@pytest.mark.parametrize("rules", [BACK, [{"until": 4, "recipe": "current"}, {"recipe": "delayed"}]])
def test_what_the_guard_demoted_stays_so_through_switches_and_a_resume(rules):
    guard = {**STRICT, "finer": True, "quiet_batches": 10**6}
    whole = Loop(rules, guard=guard, announce=False).train(STEPS)
    demoted = [event for event in whole.run.guard.events if event["action"] == "demote"]
    assert demoted and "return" not in {event["action"] for event in whole.run.guard.events}
    lowest = {event["unit"]: event["signal"].rpartition(" ")[2] for event in demoted}
    layers = layers_of(whole.model)
    for name, to in lowest.items():
        if to == HIGH:
            assert layers[name].recipe is None and layers[name].configured_recipe is not None
        else:
            assert layers[name].recipe in (None, layers[name].configured_recipe.finer)
    for at in (3, 4, 5, 7):
        resumed = Loop(rules, guard=guard, announce=False).load(whole.saved(at)).train(STEPS)
        assert same(whole.model.state_dict(), resumed.model.state_dict()), at
        assert same(whole.run.state_dict(), resumed.run.state_dict()), at


def test_a_demotion_in_the_midst_of_a_phase_of_high_precision_is_in_a_checkpoint():
    """A guard that measures nothing: its state alone."""
    guard = {"interval": 100}
    loop = Loop(BACK, guard=guard, announce=False).train(2)
    low, finer, *_ = layers_of(loop.model).values()
    low.set_recipe(None)
    finer.set_recipe(CurrentScaling())
    loop.train(STEPS)
    for at in (3, 5, 6):
        again = Loop(BACK, guard=guard, announce=False).load(loop.saved(at)).train(STEPS)
        assert same(loop.model.state_dict(), again.model.state_dict()), at
        assert [one.recipe for one in layers_of(again.model).values()][:3] == [
            None,
            CurrentScaling(),
            DelayedScaling(),
        ]


def test_a_layer_that_is_at_fault_does_not_come_back_with_a_phase_of_high_precision():
    loop = Loop(BACK, announce=False).train(2)
    (name, layer), (finer, other), *_ = layers_of(loop.model).items()
    layer.set_recipe(None)
    other.set_recipe(CurrentScaling())
    loop.train(5)
    assert {one.recipe for one in layers_of(loop.model).values()} == {None}
    loop.train(7)
    ran = {name: one.recipe for name, one in layers_of(loop.model).items()}
    assert ran.pop(name) is None and ran.pop(finer) == CurrentScaling()
    assert set(ran.values()) == {DelayedScaling()}


def test_a_history_that_begins_with_a_phase_begins_as_that_of_a_fresh_run():
    """Its first pass multiplies by 1; what it saw sets the next scale."""
    loop = Loop(WARM, announce=False).train(3)
    state = FP8State.of(loop.model).delayed
    assert not state.amax_history.any() and (state.scale == 1).all()
    loop.train(4)
    assert state.amax_history.any(dim=0).all() and (state.scale != 1).all()


def test_nobody_who_says_how_far_the_run_is_is_an_error():
    model = Model()
    foundry_fp8.apply_fp8(model, recipe=WARM, backend="emulated")
    with pytest.raises(RuntimeError, match=r"from or until, and nobody says how far"):
        model(torch.randn(4, 64))
    model.eval()(torch.randn(4, 64))


# Composer


def composed(rules, duration="8ba", constant=None, by_hand=None, **options):
    from composer import Callback, Trainer

    from foundry_fp8.algorithms.fp8 import FP8
    from tests.algorithms.test_measured import Composed

    class Watch(Callback):
        ran = []  # noqa: RUF012

        def before_train_batch(self, state, logger):
            if by_hand is not None:
                by_hand(state.model, state.timestamp.batch.value)

        def before_forward(self, state, logger):
            self.ran.append({one.recipe and one.recipe.name for one in layers_of(state.model).values()})

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 64), torch.randn(32, 32))
    model, watch = Composed(), Watch()
    watch.ran = []
    callbacks = options.pop("callbacks", [])
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=8),
        max_duration=duration,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        algorithms=[FP8(recipe=constant or rules, backend="emulated", announce=False)],
        callbacks=[watch, *callbacks],
        device="cpu",
        progress_bar=False,
        device_train_microbatch_size=4,
        **options,
    )
    trainer.fit()
    trainer.close()
    return model, watch.ran


@pytest.mark.parametrize(
    ("run", "duration"), [pytest.param("warm", "2ep", marks=pytest.mark.full), ("decay", "64sp")]
)
@pytest.mark.parametrize("moments", [(2,), pytest.param((3, 6), marks=pytest.mark.full)], ids=str)
@pytest.mark.integration
def test_composer_follows_them_and_resumes(run, duration, moments, tmp_path):
    """From a switch, and from steps between."""
    rules, constant, by_hand = RUNS[run]
    options = {"save_folder": str(tmp_path), "save_interval": "1ba", "save_overwrite": True}
    whole, ran = composed(rules, duration, **options)
    theirs, by = composed(rules, "8ba", constant, by_hand)
    assert same(whole.state_dict(), theirs.state_dict()) and ran == by
    for at in moments:
        where = tmp_path / f"ep{at // 4}-ba{at}-rank0.pt"
        resumed, rest = composed(rules, duration, load_path=str(where))
        assert same(whole.state_dict(), resumed.state_dict()) and rest == ran[2 * at :]


@pytest.mark.full
@pytest.mark.integration
def test_composers_guard_measures_after_a_switch_and_its_demotions_stay(tmp_path):
    from foundry_fp8.callbacks.divergence_guard import DivergenceGuard

    def run(**options):
        guard = DivergenceGuard(interval=1, rows=8, gradient_limit=0.02, finer=False, quiet_batches=10**6)
        return *composed(BACK, callbacks=[guard], **options), guard.guard

    whole, ran, guard = run(save_folder=str(tmp_path), save_interval="1ba")
    assert guard.demoted and ran[8] == {None} and "delayed" not in str(guard.events[-1]["batch"])
    for at in (3, 5, 6, 7):
        resumed, _, again = run(load_path=str(tmp_path / f"ep{at // 4}-ba{at}-rank0.pt"))
        assert same(whole.state_dict(), resumed.state_dict()) and again.demoted == guard.demoted


@pytest.mark.integration
def test_composer_counts_tokens_samples_and_epochs():
    rules = [{"until": "24sp", "recipe": HIGH}, {"from": "1ep", "recipe": "block"}, {"recipe": "current"}]
    _, ran = composed(rules)
    assert [next(iter(one)) for one in ran[::2]] == [None] * 3 + ["current"] + ["block"] * 4


@pytest.mark.integration
def test_the_run_log_has_each_switch_once(tmp_path):
    from foundry_fp8.callbacks.run_log import RunLog

    composed(WARM, loggers=[RunLog(path=str(tmp_path / "log.jsonl"))])
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    switches = [line for line in lines if "fp8_switch" in line]
    assert len(switches) == 2 and "from step 3 on" in switches[0] and "delayed" in switches[0]


# Trainer


@pytest.mark.parametrize(
    ("name", "options"),
    [("warm", {"gradient_checkpointing": True}), pytest.param("decay", {}, marks=pytest.mark.full)],
)
@pytest.mark.parametrize("moments", [(3,), pytest.param((2, 4), marks=pytest.mark.full)], ids=str)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_trainer_follows_them_and_resumes(name, options, moments, tmp_path, monkeypatch):
    from transformers import TrainerCallback

    from tests.integrations.test_transformers import callback, trainer_of

    monkeypatch.setattr(os, "environ", os.environ.copy())
    rules, constant, by_hand = RUNS[name]

    class Hand(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            by_hand(kwargs["model"], state.global_step)

    def run(*callbacks, resume=None, **more):
        given = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "output_dir": str(tmp_path)}
        trainer = trainer_of(list(callbacks), build_llama(), **given, **options, **more)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    saving = {"save_strategy": "steps", "save_steps": 1}
    whole = run(callback(recipe=rules), **saving)
    theirs = run(callback(recipe=constant), Hand())
    assert same(dict(whole.model.state_dict()), dict(theirs.model.state_dict()))
    said = [entry["fp8"] for entry in whole.state.log_history if "fp8" in entry]
    assert len(said) == 2
    for at in moments:  # from the second epoch on Trainer resumes with other batches
        resumed = run(callback(recipe=rules), resume=str(tmp_path / f"checkpoint-{at}"))
        assert same(dict(whole.model.state_dict()), dict(resumed.model.state_dict())), at


# What is refused


@pytest.mark.parametrize(
    ("value", "moment"),
    [
        (7, Moment(7)), ("1000ba", Moment(1000)), ("20Btok", Moment(20 * 10**9, "tok")), ("1.5Mtok", Moment(1500000, "tok")),
        ("3e4tok", Moment(30000, "tok")), ("2ep", Moment(2, "ep")), ("0.9dur", Moment(0.9, "dur")), ("1dur", Moment(1.0, "dur")),
        ("64sp", Moment(64, "sp")), ("500_000tok", Moment(500000, "tok")), ("100 ba", Moment(100)),
    ],
)  # fmt: skip
def test_times_are_composers(value, moment):
    assert parse_moment(value, "k") == moment
    if isinstance(value, str) and "B" not in value and "M" not in value:
        from composer.core.time import Time

        theirs = Time.from_timestring(value)
        assert (theirs.value, theirs.unit.value) == (moment.value, moment.unit)


@pytest.mark.parametrize(
    "value", [True, -1, 0.9, "0.9", "1.5ba", "1.5dur", "90sec", "1h30m", "5iter", "-1ba", "ba", "1e99tok", "1Xtok", "٣ba", []]
)  # fmt: skip
def test_what_is_no_time_is_refused_with_its_key(value):
    with pytest.raises(ConfigError, match=r"recipe\[0\]\.from: .*is no time\. Write batches"):
        foundry_fp8.apply_fp8(Model(), recipe=[{"from": value, "recipe": "current"}])


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([{"from": 5, "until": "5ba", "recipe": "current"}], r"recipe\[0\]: from 5ba until 5ba are no time at all"),
        ([{"from": 5, "until": "20Btok", "recipe": "current"}], r"recipe\[0\]: .*20000000000tok are not comparable"),
        ([{"recipe": "current"}, {"from": "0.9dur", "recipe": "block"}], r"recipe\[1\]: no effect: rules above it name all"),
        ([{"until": 9, "recipe": HIGH}, {"from": 9, "recipe": "block"}, {"roles": ["mlp"], "recipe": "current"}], r"recipe\[2\]: no effect"),
        ([{"until": "0ba", "recipe": "block"}, {"recipe": "current"}], r"recipe\[0\]: no effect: no moment of a run is until 0ba"),
        ([{"form": 5, "recipe": "current"}], r"recipe\[0\]\.form: unknown key.*Did you mean 'from'"),
        ([{"until": 9, "recipe": HIGH}], "every rule is high_precision"),
    ],
    ids=str,
)  # fmt: skip
def test_rules_whose_times_make_no_sense_are_refused(rules, said):
    with pytest.raises(ConfigError, match=said):
        foundry_fp8.apply_fp8(Model(), recipe=rules)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([{"until": "20Btok", "recipe": HIGH}, {"recipe": "block"}], r"recipe\[0\]: 20000000000tok is not known here \(ba is\)"),
        ([{"from": 8, "recipe": HIGH}, {"recipe": "block"}], r"recipe\[0\]: no moment of the run reaches it"),
        ([{"until": 6, "recipe": HIGH}, {"from": "0.5dur", "recipe": "block"}, {"recipe": "current"}], r"recipe\[2\]: no moment of the run"),
    ],
    ids=str,
)  # fmt: skip
def test_times_that_a_loop_does_not_come_to_or_does_not_count_are_refused(rules, said):
    with pytest.raises(ConfigError, match=said):
        foundry_fp8.FP8Run(recipe=rules, steps=STEPS, announce=False).convert(build_llama())


def test_a_share_of_a_run_of_unknown_length_is_refused_and_says_what_to_give():
    with pytest.raises(ConfigError, match=r"recipe\[1\]: 0\.75dur is not known here.*FP8Run\(steps=\.\.\.\)"):
        foundry_fp8.FP8Run(recipe=WARM, announce=False).convert(build_llama())
    with pytest.raises(ConfigError, match=r"FP8Run\.steps"):
        foundry_fp8.FP8Run(recipe=WARM, steps=0)
    by_clock = Run(fp8=FP8Config(recipe=WARM), length=length_of("1h30m"))
    assert "0.75dur is not known here" in by_clock.untimely
    assert not dataclasses.replace(by_clock, length=length_of("3ep")).untimely
    assert not dataclasses.replace(by_clock, length=None).untimely
    assert "nothing is" in dataclasses.replace(by_clock, trainer="torchtitan").untimely


def test_what_is_for_the_whole_run_is_refused_beside_them():
    for option in ({"attention": True}, {"frozen_weights": "fp8"}):
        with pytest.raises(
            ConfigError, match=rf"algorithms\.fp8\.{next(iter(option))}: it is for the whole run"
        ):
            foundry_fp8.apply_fp8(Model(), recipe=WARM, **option)


def test_units_are_combined_where_nothing_says_how_they_compare():
    moments = [Moment(100), Moment(0.9, "dur")]
    assert len(clocks(moments)) == 4 and len(clocks(moments, Moment(1000))) == 3
    assert clocks(moments, Moment(100)) == [{"ba": 0}, {"ba": 90}]


def test_a_resume_may_have_other_times_and_no_other_recipes():
    state = FP8State.of(Loop(WARM, announce=False).model).state_dict()
    later = [{**WARM[0], "until": 5}, *WARM[1:]]
    FP8State.of(Loop(later, announce=False).model).load_state_dict(state)
    other = [WARM[0], {**WARM[1], "recipe": "block"}, WARM[2]]
    with pytest.raises(RuntimeError, match="another policy"):
        FP8State.of(Loop(other, announce=False).model).load_state_dict(state)


def test_a_phase_that_no_rule_covers_is_in_high_precision():
    loop = Loop([{"from": 2, "until": 4, "recipe": "current"}], announce=False).train(6)
    assert loop.ran == [{None}] * 2 + [{"current"}] * 2 + [{None}] * 2
    assert {row.precision for row in loop.run.report.rows if row.action == "converted"} == {"fp32"}


def test_a_shape_that_one_recipe_cannot_take_is_in_high_precision_meanwhile():
    model = Model(d=32)
    model.head = torch.nn.Linear(32, 48)  # not for mxfp8
    rules = [{"until": 3, "modules": "*", "recipe": "mxfp8"}, {"modules": ["*", "head"], "recipe": "current"}]
    report = foundry_fp8.apply_fp8(model, recipe=rules, backend="emulated")
    reasons = {row.name: row.reason for row in report.rows}
    assert reasons["head"] == "high_precision until 3ba; current"
    assert reasons["blocks.0.up"] == "mxfp8 until 3ba; current"


def test_untimed_rules_have_no_turns():
    model = Model()
    foundry_fp8.apply_fp8(model, recipe=[{"roles": ["mlp"], "recipe": NVFP4Scaling()}, {"recipe": "current"}])
    assert not any(layer.turns for layer in layers_of(model).values())
    assert "held" not in FP8State.of(model).state_dict()
    assert dataclasses.is_dataclass(Moment)
