"""The guard in Composer's trainer; what it finds and does is tested without one in observe/guard."""

from __future__ import annotations

import logging

import pytest
import torch
from composer.core import Callback

from tests.callbacks.conftest import batches, build_llama, series
from tests.observe.guard.test_guard import DAMAGED, damage

pytestmark = pytest.mark.integration

UNIT = "model.model.layers.1.mlp.down_proj"
STEPS = 24


def fp8():
    from foundry_fp8.algorithms.fp8 import FP8

    return FP8(recipe="delayed", announce=False)


def guard(**options):
    from foundry_fp8.callbacks.divergence_guard import DivergenceGuard

    return DivergenceGuard(**{"interval": 2, "rows": 4, "quiet_batches": 4, "finer": False} | options)


class Damage(Callback):
    """Damages a layer during the steps ``DAMAGED``."""

    def __init__(self, model):
        self.factor = damage(model.model.layers[1].mlp.down_proj)

    def after_dataloader(self, state, logger):
        self.factor[3] = 1e6 if state.timestamp.batch.value in DAMAGED else 1.0


def run(train, *monitors, steps=STEPS, algorithms=None, **options):
    model = build_llama()
    callbacks = [Damage(model), *monitors]
    algorithms = [fp8()] if algorithms is None else algorithms
    return train(
        model, callbacks, algorithms=algorithms, steps=steps, data=batches(STEPS), lr=1e-4, **options
    )


def moves(trainer):
    watch = next(c for c in trainer.state.callbacks if getattr(c, "key", "") == "divergence_guard")
    return [
        (e["action"], e["unit"]) for e in watch.guard.events if e["action"] in ("demote", "return", "stop")
    ]


def test_a_damaged_layer_is_demoted_and_returns_and_what_was_measured_is_logged(train):
    trainer = run(train, guard(details=True))
    assert moves(trainer) == [("demote", UNIT), ("return", UNIT)]
    gap, worst, demoted = (
        series(trainer, key)
        for key in ("fp8_error/loss_gap", "fp8_error/gradient/worst", "guard/demoted_layers")
    )
    assert len(gap) == len(worst) >= STEPS // 2 - 1
    assert max(worst) > 0.35 > worst[0] and max(demoted) == 1 and demoted[-1] == 0
    assert len(series(trainer, "fp8_error/gradient/layer_001")) == len(worst)
    assert series(trainer, "guard/alarms")[-1] >= 1


def test_a_run_that_only_warns_has_the_losses_of_one_without_a_guard(train):
    watch = guard(actions=["warn"], interval=1)
    watched, plain = (run(train, *monitors, steps=DAMAGED.start + 4) for monitors in ([watch], []))
    assert watch.guard.events and not moves(watched)
    assert series(watched, "loss/train/total") == series(plain, "loss/train/total")
    pairs = zip(watched.state.model.state_dict().items(), plain.state.model.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


def test_a_run_that_is_to_stop_does(train):
    trainer = run(train, guard(actions=["stop"]))
    assert moves(trainer) == [("stop", "model")]
    assert trainer.state.timestamp.batch.value < DAMAGED.stop


def test_it_resumes_bit_exactly_with_a_layer_demoted(train, tmp_path):
    whole = guard()
    run(train, whole, save_folder=str(tmp_path), save_interval="1ba", save_num_checkpoints_to_keep=-1)
    again = guard()
    trainer = run(train, again, load_path=str(tmp_path / "ep0-ba10-rank0.pt"))
    assert moves(trainer) == [("demote", UNIT), ("return", UNIT)]
    assert str(again.guard.state_dict()) == str(whole.guard.state_dict())


def test_a_model_without_fp8_is_one_warning(train, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = run(train, guard(interval=1), algorithms=[], steps=4)
    assert sum("no FP8 layer" in record.getMessage() for record in caplog.records) == 1
    assert not [key for key in trainer.logged.data if key.startswith(("guard/", "fp8_error/"))]


def test_a_measurement_that_fails_switches_it_off_and_training_goes_on(train, caplog):
    class Fails(Callback):
        def fit_start(self, state, logger):
            watch.guard.probe.loss_of = lambda model, batch: 1 / 0

    watch = guard(interval=1)
    trainer = train(build_llama(), [watch, Fails()], algorithms=[fp8()], steps=4)
    assert "ZeroDivisionError" in watch.failed and "off for the rest of this run" in caplog.text
    assert trainer.state.timestamp.batch.value == 4
