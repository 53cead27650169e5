"""The guard in real runs: demotion, promotion, resuming, the other actions."""

from __future__ import annotations

import logging

import pytest
import torch

from foundry_fp8.layers.linear import FP8Linear
from tests.callbacks.conftest import batches, build_llama, series

pytestmark = pytest.mark.integration

QUICK = {"interval": 1, "warmup": 3, "patience": 1, "window": 8}


def guard(**options):
    from foundry_fp8.callbacks.divergence_guard import DivergenceGuard

    return DivergenceGuard(**QUICK | {"details": True} | options)


def fp8(recipe="delayed"):
    from foundry_fp8.algorithms.fp8 import FP8

    return FP8(recipe=recipe)


class Outlier:
    """Multiplies one channel of what block 1's down projection reads, while ``size`` is not 1."""

    def __init__(self, model, schedule):
        from composer.core import Callback

        outer = self
        self.size = 1.0
        linear = model.model.layers[1].mlp.down_proj

        def bump(module, args):
            factor = torch.ones(args[0].shape[-1])
            factor[3] = outer.size
            return (args[0] * factor,)

        linear.register_forward_pre_hook(bump)

        class Schedule(Callback):
            def batch_start(self, state, logger):
                outer.size = schedule(state.timestamp.batch.value)

        self.callback = Schedule()


def recipes(model, layer):
    return {
        "high_precision" if m.recipe is None else m.recipe.name
        for m in model.model.layers[layer].modules()
        if isinstance(m, FP8Linear)
    }


def moves(watch):
    return [
        (e["batch"], e["unit"], e["action"], e["signal"])
        for e in watch.events
        if e["action"] in ("demote", "promote")
    ]


def test_the_layer_at_fault_is_demoted_rung_by_rung_and_the_others_are_left_alone(train):
    model, watch = build_llama(), guard(signals=["kurtosis"])
    grow = Outlier(model, lambda step: 1.0 if step < 5 else 3000.0)
    trainer = train(model, [grow.callback, watch], algorithms=[fp8()], steps=12, lr=0.0)
    assert watch.failed is None
    assert next(move[1:] for move in moves(watch)) == ("layer_001", "demote", "delayed -> current")
    assert recipes(model, 0) == {"delayed"}
    assert recipes(model, 1) == {"current"}
    assert series(trainer, "guard/demoted_layers")[-1] == 1.0
    assert {e["unit"] for e in watch.events} == {"layer_001"}
    alarm = next(e for e in watch.events if e["action"] == "alarm")
    assert alarm["value"] > alarm["threshold"]


def test_a_damage_that_lasts_ends_in_high_precision_and_a_quiet_period_brings_it_back(train):
    model, watch = build_llama(), guard(signals=["flushed"], quiet_batches=4, finer="current")
    grow = Outlier(model, lambda step: 1e6 if 6 <= step < 12 else 1.0)
    trainer = train(model, [grow.callback, watch], algorithms=[fp8()], steps=24, lr=0.0)
    assert watch.failed is None
    found = moves(watch)
    assert [move[1:] for move in found] == [
        ("layer_001", "demote", "delayed -> current"),
        ("layer_001", "demote", "current -> high_precision"),
        ("layer_001", "promote", "high_precision -> current"),
        # The default history holds 1024 passes, the outlier among them: it has to be forgotten, or this is undone at once.
        ("layer_001", "promote", "current -> delayed"),
    ]
    assert recipes(model, 1) == {"delayed"}
    promoted = [move[0] for move in found if move[2] == "promote"]
    assert promoted[-1] - promoted[-2] >= 4
    assert series(trainer, "guard/demoted_layers")[-1] == 0.0
    after = series(trainer, "guard/flushed/worst")[promoted[-1] :]
    assert max(after) == pytest.approx(series(trainer, "guard/flushed/worst")[4], abs=0.02)


def test_a_nan_loss_alarms_at_once_and_stop_stops(train, caplog):
    model, watch = build_llama(), guard(actions=["stop"], signals=["loss"])

    from composer.core import Callback

    class Poison(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch.value == 3:
                with torch.no_grad():
                    model.lm_head.weight[0, 0] = torch.nan

    with caplog.at_level(logging.WARNING):
        trainer = train(model, [Poison(), watch], steps=8)
    assert trainer.state.timestamp.batch.value == 4
    assert watch.events[0]["unit"] == "model"
    assert "stopping the run at batch 4" in caplog.text


def test_the_checkpoint_action_saves_one_that_loads(train, tmp_path):
    model, watch = (
        build_llama(),
        guard(actions=["checkpoint", "demote"], signals=["kurtosis"], checkpoint_folder=str(tmp_path)),
    )
    grow = Outlier(model, lambda step: 1.0 if step < 5 else 3000.0)
    train(model, [grow.callback, watch], algorithms=[fp8()], steps=7, lr=0.0)
    assert watch.failed is None
    (saved,) = tmp_path.rglob("*.pt")
    assert saved.name == "ba6-rank0.pt"
    state = torch.load(saved, weights_only=False)["state"]
    assert "model" in state
    assert state["timestamp"]["Timestamp"]["batch"] == 6


def test_resuming_keeps_rungs_statistics_and_events(train, tmp_path):
    def build(model):
        return guard(signals=["kurtosis", "loss", "gradient_norm"]), Outlier(
            model, lambda step: 1.0 if step < 5 else 3000.0
        )

    data = batches(10)
    whole_model = build_llama()
    whole, grow = build(whole_model)
    straight = train(whole_model, [grow.callback, whole], algorithms=[fp8()], steps=10, data=data)

    first_model = build_llama()
    first, grow = build(first_model)
    train(first_model, [grow.callback, first], algorithms=[fp8()], steps=7, data=data,
          save_folder=str(tmp_path), save_interval="7ba")  # fmt: skip
    again_model = build_llama(seed=5)
    again, grow = build(again_model)
    resumed = train(again_model, [grow.callback, again], algorithms=[fp8()], steps=10, data=data,
                    load_path=str(tmp_path / "latest-rank0.pt"))  # fmt: skip
    assert again.failed is None
    assert moves(whole), "the run has to demote something for this test to mean anything"
    assert moves(whole)[0][0] <= 7
    assert moves(again) == moves(whole)
    assert again.carried_state()["rungs"] == whole.carried_state()["rungs"]
    assert {k: s.threshold for k, s in again._signals.items()} == {
        k: s.threshold for k, s in whole._signals.items()
    }
    assert series(resumed, "loss/train/total") == series(straight, "loss/train/total")[7:]
    assert recipes(again_model, 1) == recipes(whole_model, 1)


@pytest.mark.parametrize(
    ("finer", "recipe"), [(None, "high_precision"), ("block", "block"), ("current", "current")]
)
def test_a_demoted_layer_never_resumes_in_what_it_was_demoted_from(train, tmp_path, caplog, finer, recipe):
    model, first = build_llama(), guard(signals=["kurtosis"])
    grow = Outlier(model, lambda step: 1.0 if step < 5 else 3000.0)
    train(
        model,
        [grow.callback, first],
        algorithms=[fp8()],
        steps=7,
        lr=0.0,
        save_folder=str(tmp_path),
        save_interval="7ba",
    )
    assert recipes(model, 1) == {"current"}
    model, again = build_llama(), guard(signals=["kurtosis"], finer=finer)
    caplog.clear()
    train(model, [again], algorithms=[fp8()], steps=8, lr=0.0, load_path=str(tmp_path / "latest-rank0.pt"))
    assert again.failed is None
    assert recipes(model, 0) == {"delayed"} and recipes(model, 1) == {recipe}
    assert ("none of its rungs now" in caplog.text) is (finer != "current")


def test_quiet_batches_may_change_on_resume(train, tmp_path):
    def run(watch, steps, **options):
        model = build_llama()
        grow = Outlier(model, lambda step: 1e6 if 4 <= step < 6 else 1.0)
        train(model, [grow.callback, watch], algorithms=[fp8()], steps=steps, lr=0.0, **options)
        return model

    first = guard(signals=["flushed"], quiet_batches=500)
    model = run(first, 8, save_folder=str(tmp_path), save_interval="8ba")
    assert recipes(model, 1) != {"delayed"}
    again = guard(signals=["flushed"], quiet_batches=3)
    model = run(again, 16, load_path=str(tmp_path / "latest-rank0.pt"))
    assert [move[2] for move in moves(again)][-1] == "promote"
    assert recipes(model, 1) == {"delayed"}


def test_a_model_in_high_precision_is_watched_all_the_same(train):
    model, watch = build_llama(), guard(signals=["kurtosis", "gradient_norm", "loss"])
    grow = Outlier(model, lambda step: 1.0 if step < 6 else 3000.0)
    trainer = train(model, [grow.callback, watch], steps=10, lr=0.0)
    assert watch.failed is None
    assert any(e["unit"] == "layer_001" and e["signal"] == "kurtosis" for e in watch.events)
    assert not moves(watch)
    assert len(series(trainer, "guard/kurtosis/worst")) == 10


def test_the_norm_is_that_of_all_gradients_before_clipping(train):
    from composer.algorithms import GradientClipping

    for microbatch in (4, 1):
        model, watch = build_llama(), guard(signals=["gradient_norm"])
        reference = build_llama()
        ids = torch.stack([row["input_ids"] for row in batches(1)])
        loss = torch.nn.functional.cross_entropy(
            reference(input_ids=ids).logits[:, :-1].reshape(-1, 64), ids[:, 1:].reshape(-1)
        )
        loss.backward()
        expected = max(
            float(torch.stack([p.grad.norm() for p in layer.parameters()]).norm())
            for layer in reference.model.layers
        )
        outside = [p for n, p in reference.named_parameters() if ".layers." not in n]
        expected = max(expected, float(torch.stack([p.grad.norm() for p in outside]).norm()))
        clip = GradientClipping(clipping_type="norm", clipping_threshold=1e-3)
        trainer = train(model, [watch], algorithms=[clip], steps=1, device_train_microbatch_size=microbatch)
        assert series(trainer, "guard/gradient_norm/worst") == pytest.approx([expected], rel=1e-4)
