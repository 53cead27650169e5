"""The guard in real runs: demotion, promotion, resuming, the other actions."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from foundry_fp8.layers.linear import FP8Linear
from tests.callbacks.conftest import batches, build_llama, series

pytestmark = pytest.mark.integration

FIRST, SICK = "model.model.layers.0.self_attn.q_proj", "model.model.layers.1.mlp.down_proj"


def guard(**options):
    from foundry_fp8.callbacks.divergence_guard import DivergenceGuard

    return DivergenceGuard(**{"interval": 1, "details": True} | options)


def fp8(recipe="delayed", **options):
    from foundry_fp8.algorithms.fp8 import FP8

    return FP8(recipe=recipe, **options)


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


def recipes(model):
    """What each FP8 linear runs that does not run what is configured."""
    return {
        m.fqn: "high_precision" if m.recipe is None else m.recipe.name
        for m in model.modules()
        if isinstance(m, FP8Linear) and m.recipe != m.configured_recipe
    }


def moves(watch):
    return [
        (e["batch"], e["unit"], e["action"], e["signal"])
        for e in watch.events
        if e["action"] in ("demote", "promote")
    ]


def test_the_linear_at_fault_is_demoted_while_it_lasts_and_comes_back_when_its_shadow_is_healthy(train):
    model, watch = build_llama(), guard(quiet_batches=3, finer="current")
    grow = Outlier(model, lambda step: 1e6 if 10 <= step < 18 else 1.0)
    trainer = train(model, [grow.callback, watch], algorithms=[fp8()], steps=28, lr=0.0)
    assert watch.failed is None
    found = [move for move in moves(watch) if move[1] == SICK]
    assert [move[1:] for move in found] == [
        (SICK, "demote", "delayed -> current"),
        (SICK, "demote", "current -> high_precision"),
        (SICK, "promote", "high_precision -> current"),
        # The default history holds 1024 passes, the outlier among them: it has to be forgotten, or this is undone at once.
        (SICK, "promote", "current -> delayed"),
    ]
    assert min(batch for batch, *_, signal in found if signal == "high_precision -> current") > 18 + 2
    assert recipes(model) == {}
    assert series(trainer, "guard/demoted_layers")[-1] == 0.0
    alarm = next(e for e in watch.events if e["action"] == "alarm" and e["unit"] == SICK)
    assert alarm["value"] > alarm["threshold"]
    after = series(trainer, "guard/flushed/worst")[found[-1][0] :]
    assert max(after) == pytest.approx(series(trainer, "guard/flushed/worst")[4], abs=0.02)


def test_what_only_a_product_shows_is_demoted_while_it_lasts_and_comes_back(train):
    """A direction of one weight grows; what it brings is taken off behind the GEMM, and each operand is rounded as well as ever."""
    from composer.core import Callback

    model, watch = build_llama(), guard(quiet_batches=3, finer=None)
    linear = model.model.layers[1].mlp.down_proj
    left, right = (torch.sign(torch.randn(n, generator=torch.Generator().manual_seed(n))) for n in linear.weight.shape)  # fmt: skip
    linear.register_forward_hook(
        lambda module, args, output: output - grow.size * (args[0] @ right)[..., None] * left
    )

    class Grow(Callback):
        size = 0.0

        def batch_start(self, state, logger):
            before, self.size = self.size, 2.0 if 10 <= state.timestamp.batch.value < 18 else 0.0
            with torch.no_grad():
                linear.weight += (self.size - before) * torch.outer(left, right)

    grow = Grow()
    train(model, [grow, watch], algorithms=[fp8("current")], steps=28, lr=0.0)
    assert watch.failed is None
    assert [move[1:3] for move in moves(watch)] == [(SICK, "demote"), (SICK, "promote")]
    assert {e["signal"] for e in watch.events if e["action"] == "alarm"} >= {"product_noise of y"}
    assert moves(watch)[0][0] <= 13 and moves(watch)[1][0] > 18 + 2


def test_what_no_error_of_a_layer_shows_is_demoted_for_what_it_costs_of_the_loss(train):
    """Tokens carry a signal of all directions, which is taken off behind the GEMM: the product is rounded as well as ever. The model is sure of
    what it says, so that there is something to lose."""
    from composer.core import Callback

    model, watch = build_llama(), guard(quiet_batches=3, finer=None)
    model.lm_head.weight.data *= 10
    linear, generator = model.model.layers[1].mlp.down_proj, torch.Generator().manual_seed(3)

    class Grow(Callback):
        size = 0.0

        def batch_start(self, state, logger):
            self.size = 1e3 if 10 <= state.timestamp.batch.value < 18 else 0.0

        def add(self, module, args):
            self.signal = self.size * torch.randn(args[0].shape, generator=generator)
            return (args[0] + self.signal,)

        def take_off(self, module, args, output):
            return output - torch.nn.functional.linear(self.signal, module.weight)

    grow = Grow()
    linear.register_forward_pre_hook(grow.add)
    linear.register_forward_hook(grow.take_off)
    trainer = train(model, [grow, watch], algorithms=[fp8("current")], steps=28, lr=0.0)
    assert watch.failed is None
    assert [move[1:3] for move in moves(watch)] == [(SICK, "demote"), (SICK, "promote")]
    assert {e["signal"] for e in watch.events if e["unit"] == SICK and e["action"] == "alarm"} == {
        "loss_cost of y"
    }
    assert moves(watch)[0][0] <= 13 and moves(watch)[1][0] > 18 + 2
    cost = series(trainer, "guard/loss_cost")
    assert max(cost[:9]) < 2e-4 < 1e-2 < cost[10] and max(cost[13:17]) < 2e-4, (
        "of high precision nothing is counted"
    )


def test_what_rounding_costs_is_the_same_whatever_the_microbatches_and_the_loss_scale(train, monkeypatch):
    """Of a batch of equal rows, one microbatch says what the batch does; float16's scale is of no matter."""
    import composer.core

    def cost(**options):
        data = [row for row in batches(3, rows=1) for _ in range(4)]
        watch = guard()
        trainer = train(
            build_llama(), [watch], algorithms=[fp8("current")], steps=3, data=data, lr=0.0, **options
        )
        assert watch.failed is None
        return series(trainer, "guard/loss_cost")

    whole = cost()
    assert min(whole) > 0 and cost(device_train_microbatch_size=1) == pytest.approx(whole, rel=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    monkeypatch.setattr(
        composer.core.State, "scaler", property(lambda self: scaler, lambda self, value: None), raising=False
    )
    scaler.scale(torch.zeros(()))  # which it does with the loss
    assert cost() == pytest.approx([value / 2**20 for value in whole])


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_weights_of_zero_are_no_level_that_others_rise_from(train, recipe):
    """A block that was the identity begins to train: its rows are alike in the first steps, and cost more than rounding ever did."""
    from composer.core import Callback

    model, watch = build_llama(), guard()
    weight = model.model.layers[1].mlp.down_proj.weight
    born = 1e-3 * (1 + 0.15 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    torch.nn.init.zeros_(weight)

    class Born(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch.value == 12:
                weight.data.copy_(born)

    trainer = train(model, [Born(), watch], algorithms=[fp8(recipe)], steps=24, lr=0.0)
    assert watch.failed is None
    assert max(series(trainer, "guard/noise/worst")[12:]) > 4, "which is an alarm where a level has been seen"
    assert [e for e in watch.events if e["unit"] == SICK] == []


@pytest.mark.parametrize("actions", [["demote"], ["warn"]])
def test_a_history_of_another_run_is_told_and_renewed_in_the_step_that_meets_it(train, actions):
    """Between two observations; nothing is demoted for what is mended."""
    from composer.core import Callback

    model, watch = build_llama(), guard(interval=10, actions=actions)
    scales = []

    class Stale(Callback):
        def batch_start(self, state, logger):
            for module in model.modules():
                if isinstance(module, FP8Linear):
                    if state.timestamp.batch.value == 23:
                        module.slots["x"].amax_history.fill_(1e8)
                    if module.fqn == FIRST:
                        scales.append(float(module.slots["x"].state.scale[module.slots["x"].index]))

    train(model, [Stale(), watch], algorithms=[fp8()], steps=28, lr=0.0)
    assert watch.failed is None and not moves(watch)
    told = [
        (e["batch"], e["action"]) for e in watch.events if (e["unit"], e["signal"]) == (FIRST, "history of x")
    ]
    assert told == [(24, "alarm"), (24, "renew")][: 2 if actions == ["demote"] else 1]
    assert "1e+08" in next(e["detail"] for e in watch.events)
    assert (scales[25] == pytest.approx(scales[22], rel=0.5)) is (actions == ["demote"])


def test_a_history_that_fp8_bears_is_renewed_without_an_alarm(train):
    """Loss and signs are as before; what it would cost in the long run is not waited for."""
    from composer.core import Callback

    model, watch = build_llama(), guard(interval=5)

    class Stale(Callback):
        def batch_start(self, state, logger):
            for module in model.modules():
                if isinstance(module, FP8Linear) and state.timestamp.batch.value == 23:
                    history = module.slots["x"].amax_history
                    history.fill_(40 * float(history.max()))

    train(model, [Stale(), watch], algorithms=[fp8()], steps=32, lr=0.0)
    assert watch.failed is None and not moves(watch)
    renewed = {e["unit"]: e for e in watch.events}
    assert {e["action"] for e in watch.events} == {"renew"} and FIRST in renewed
    assert 24 < renewed[FIRST]["batch"] < 29 and "starts afresh" in renewed[FIRST]["detail"]


@pytest.mark.parametrize("finer", ["current", None])
def test_no_promotion_while_the_cause_is_still_there(train, finer):
    """In high precision nobody measures saturation; the shadow does."""
    model, watch = build_llama(), guard(quiet_batches=2, finer=finer)
    grow = Outlier(model, lambda step: 1e6 if step >= 9 else 1.0)
    train(model, [grow.callback, watch], algorithms=[fp8()], steps=24, lr=0.0)
    assert watch.failed is None
    assert {move[2] for move in moves(watch) if move[1] == SICK} == {"demote"}
    assert recipes(model)[SICK] == "high_precision"


def test_what_comes_at_once_is_met_between_two_observations(train):
    """Block formats have no history: one linear in turn is looked at in every batch."""
    model, watch = build_llama(), guard(interval=4)
    size = {"now": 1.0}

    def bump(module, args):
        factor = torch.ones(args[0].shape[-1])
        factor[::32] = size["now"]
        return (args[0] * factor,)

    linears = [m for n, m in model.named_modules() if n.endswith("_proj")]
    for linear in linears:
        linear.register_forward_pre_hook(bump)

    from composer.core import Callback

    class Jump(Callback):
        def batch_start(self, state, logger):
            size["now"] = 1e7 if state.timestamp.batch.value >= 33 else 1.0

    train(model, [Jump(), watch], algorithms=[fp8("mxfp8")], steps=38, lr=0.0)
    assert watch.failed is None
    told = [e for e in watch.events if e["action"] == "demote"]
    assert {e["batch"] for e in told} == {35}, "the batch after the first that was sick, not the 36th"
    assert set(recipes(model).values()) == {"high_precision"} and len(recipes(model)) > len(linears) / 2


def test_batches_that_are_clipped_between_observations_are_counted_in_every_pass(train):
    """Every fifth batch is of another source that a history of 4 forgets, and none of them is due."""
    model, watch = build_llama(), guard(interval=5, quiet_batches=5)
    grow = Outlier(model, lambda step: 300.0 if 20 <= step < 50 and step % 5 == 1 else 1.0)
    recipe = {"name": "delayed", "amax_history_len": 4}
    train(model, [grow.callback, watch], algorithms=[fp8(recipe)], steps=50, lr=0.0)
    assert watch.failed is None
    found = {move[1:] for move in moves(watch)}
    assert (SICK, "demote", "delayed -> high_precision") in found
    assert all("layers.1.mlp" in unit for unit, *_ in found), "what is in front of it has its gradients"
    assert "clipped of x" in {e["signal"] for e in watch.events if e["action"] == "alarm"}


def test_gradients_that_jump_again_and_again_between_observations_leave_the_recipe_for_good(train):
    """Every third batch's gradients of one linear are 2^30 as large, and no history suits both."""
    from composer.core import Callback

    model, watch = build_llama(), guard(interval=10, quiet_batches=10)
    size = {"now": 1.0}

    class Jump(Callback):
        def batch_start(self, state, logger):
            step = state.timestamp.batch.value
            size["now"] = 2.0**30 if step >= 82 and step % 3 == 1 else 1.0

    def larger(module, args, output):
        output.register_hook(lambda grad, factor=size["now"]: grad * factor)
        args[0].register_hook(lambda grad, factor=size["now"]: grad / factor)

    model.model.layers[1].mlp.down_proj.register_forward_hook(larger)
    recipe = {"name": "delayed", "amax_history_len": 8}
    train(model, [Jump(), watch], algorithms=[fp8(recipe)], steps=120, lr=0.0)
    assert watch.failed is None
    assert {move[1:] for move in moves(watch)} == {(SICK, "demote", "delayed -> high_precision")}
    assert "clipped of dy" in {e["signal"] for e in watch.events if e["action"] == "alarm"}


def test_one_token_that_sticks_out_is_told_and_moves_nothing_while_nothing_is_damaged(train):
    """A sign, not a damage: block scaling keeps every other token as it was."""
    model, watch = build_llama(hidden_size=128, intermediate_size=128), guard()
    size = {"now": 1.0}

    def bump(module, args):
        factor = torch.ones(args[0].shape)
        factor[0, 3, 7] = size["now"]
        return (args[0] * factor,)

    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(bump)

    from composer.core import Callback

    class Grow(Callback):
        def batch_start(self, state, logger):
            size["now"] = 1000.0 if state.timestamp.batch.value >= 12 else 1.0

    train(model, [Grow(), watch], algorithms=[fp8("block")], steps=16, lr=0.0)
    assert watch.failed is None
    told = {(e["unit"], e["signal"]) for e in watch.events if e["action"] == "alarm"}
    assert ("layer_001", "kurtosis_flat") in told
    assert ("layer_001", "kurtosis") not in told
    assert not moves(watch)


def test_attention_whose_logits_outgrow_fp8_is_demoted_and_comes_back(train):
    """Every operand is as healthy as ever, and rounding moves the logits by more than one."""
    model, watch = build_llama(), guard(quiet_batches=3)

    from composer.core import Callback

    class Grow(Callback):
        def batch_start(self, state, logger):
            factor = {12: 120.0, 18: 1 / 120.0}.get(state.timestamp.batch.value)
            if factor is not None:
                with torch.no_grad():
                    model.model.layers[1].self_attn.q_proj.weight.mul_(factor)
                    model.model.layers[1].self_attn.k_proj.weight.mul_(factor)

    train(model, [Grow(), watch], algorithms=[fp8("current", attention=True)], steps=28, lr=0.0)
    assert watch.failed is None
    attention = "model.model.layers.1.self_attn.fp8_attention"
    found = [move for move in moves(watch) if move[1] == attention]
    assert [move[2:] for move in found] == [
        ("demote", "current -> high_precision"),
        ("promote", "high_precision -> current"),
    ]
    assert 12 < found[0][0] <= 18 < found[1][0]
    assert moves(watch)[0] == found[0], "before the gradients of its saturated softmax are damaged too"


@pytest.mark.parametrize("saves", [True, False])
def test_a_nan_loss_alarms_at_once_and_stop_stops_and_says_where_to_go_on(train, caplog, tmp_path, saves):
    model, watch = build_llama(), guard(actions=["stop"])
    saving = {"save_folder": str(tmp_path), "save_interval": "2ba"} if saves else {}

    from composer.core import Callback

    class Poison(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch.value == 3:
                with torch.no_grad():
                    model.lm_head.weight[0, 0] = torch.nan

    with caplog.at_level(logging.WARNING):
        trainer = train(model, [Poison(), watch], steps=8, **saving)
    assert trainer.state.timestamp.batch.value == 4
    assert "model" in {e["unit"] for e in watch.events if e["action"] == "alarm"}
    assert "batch 4, model: stop the run" in caplog.text
    said = watch.events[-1]["why"]
    if not saves:
        assert "nothing was saved before" in said
        return
    assert "checkpoint before is of batch 2;" in said
    path = re.search(r"load_path: (\S+) a run", said)[1]  # batch 4 was saved since, with the NaN in it
    resumed = train(build_llama(), [guard(actions=["stop"])], steps=8, load_path=path)
    assert resumed.state.timestamp.batch.value == 8
    assert all(bool(torch.isfinite(p).all()) for p in resumed.state.model.parameters())


def test_the_checkpoint_action_saves_one_that_loads(train, tmp_path):
    model, watch = build_llama(), guard(actions=["checkpoint", "demote"], checkpoint_folder=str(tmp_path))
    grow = Outlier(model, lambda step: 1.0 if step < 9 else 1e6)
    train(model, [grow.callback, watch], algorithms=[fp8()], steps=12, lr=0.0)
    assert watch.failed is None
    saved = sorted(tmp_path.rglob("*.pt"))
    state = torch.load(saved[0], weights_only=False)["state"]
    assert "model" in state
    assert f"ba{state['timestamp']['Timestamp']['batch']}-rank0.pt" == saved[0].name


def test_resuming_keeps_rungs_statistics_and_events(train, tmp_path):
    def build(model):
        return guard(quiet_batches=4), Outlier(model, lambda step: 1e6 if 9 <= step < 13 else 1.0)

    data = batches(22)
    whole_model = build_llama()
    whole, grow = build(whole_model)
    straight = train(whole_model, [grow.callback, whole], algorithms=[fp8()], steps=22, data=data)

    first_model = build_llama()
    first, grow = build(first_model)
    train(first_model, [grow.callback, first], algorithms=[fp8()], steps=14, data=data,
          save_folder=str(tmp_path), save_interval="14ba")  # fmt: skip
    again_model = build_llama(seed=5)
    again, grow = build(again_model)
    resumed = train(again_model, [grow.callback, again], algorithms=[fp8()], steps=22, data=data,
                    load_path=str(tmp_path / "latest-rank0.pt"))  # fmt: skip
    assert again.failed is None
    assert {move[2] for move in moves(whole)} == {"demote", "promote"}
    assert moves(whole)[0][0] <= 14 < moves(whole)[-1][0]
    assert moves(again) == moves(whole)
    assert again.decision.state_dict() == whole.decision.state_dict()
    assert series(resumed, "loss/train/total") == series(straight, "loss/train/total")[14:]
    assert recipes(again_model) == recipes(whole_model)


@pytest.mark.parametrize(
    ("finer", "recipe"), [(None, "high_precision"), ("block", "block"), ("current", "current")]
)
def test_a_demoted_layer_never_resumes_in_what_it_was_demoted_from(train, tmp_path, caplog, finer, recipe):
    model, first = build_llama(), guard()
    grow = Outlier(model, lambda step: 1.0 if step < 9 else 1e6)
    train(
        model,
        [grow.callback, first],
        algorithms=[fp8()],
        steps=12,
        lr=0.0,
        save_folder=str(tmp_path),
        save_interval="12ba",
    )
    assert recipes(model)[SICK] == "current"
    model, again = build_llama(), guard(finer=finer)
    caplog.clear()
    train(model, [again], algorithms=[fp8()], steps=13, lr=0.0, load_path=str(tmp_path / "latest-rank0.pt"))
    assert again.failed is None
    assert recipes(model)[SICK] == recipe and max(move[0] for move in moves(again)) <= 12
    assert ("none of its rungs now" in caplog.text) is (finer != "current")


def test_a_guard_that_resumes_an_older_one_s_state_says_once_what_starts_afresh(train, caplog):
    first = guard()
    train(build_llama(), [first], algorithms=[fp8()], steps=3)
    saved = first.carried_state()
    saved["decision"]["rungs"][SICK] = [1, "current"]
    review = dict(saved["reviews"]["FP8 state"])
    del review["since"], review["recurring"]
    decision = {name: value for name, value in saved["decision"].items() if name != "trial"}
    older = {**saved, "decision": decision, "reviews": {"FP8 state": review}}
    del older["losses"]
    for state, says in ((saved, 0), (older, 1)):
        model, again = build_llama(), guard()
        again.take_carried_state(state)
        caplog.clear()
        train(model, [again], algorithms=[fp8()], steps=1)
        assert again.failed is None and recipes(model) == {SICK: "current"}
        told = [r.getMessage() for r in caplog.records if "another version" in r.getMessage()]
        assert len(told) == says
    names = "losses, decision/trial, reviews/FP8 state/recurring, reviews/FP8 state/since are not in both"
    assert names in told[0] and "starts afresh" in told[0]


def test_a_model_in_high_precision_is_watched_all_the_same(train):
    model, watch = build_llama(), guard()
    grow = Outlier(model, lambda step: 1.0 if step < 10 else 3000.0)
    trainer = train(model, [grow.callback, watch], steps=14, lr=0.0)
    assert watch.failed is None
    assert any(e["unit"] == "layer_001" and e["signal"] == "kurtosis" for e in watch.events)
    assert not moves(watch)
    assert len(series(trainer, "guard/kurtosis/worst")) == 14


@pytest.mark.parametrize("lr", [2e-2])
def test_a_large_learning_rate_that_trains_well_demotes_nothing(train, lr):
    model, watch = build_llama(), guard(interval=2)
    data = batches(8) * 12
    trainer = train(model, [watch], algorithms=[fp8()], steps=96, data=data, lr=lr)
    losses = series(trainer, "loss/train/total")
    assert losses[-1] < 0.8 * losses[0]
    assert watch.failed is None and not moves(watch)


def test_the_norm_is_that_of_all_gradients_before_clipping(train):
    from composer.algorithms import GradientClipping

    for microbatch in (4, 1):
        model, watch = build_llama(), guard()
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
