"""recipe: measured: what is chosen, by which number, and what a run keeps of it."""

import copy

import pytest
import torch

import foundry_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.state import FP8State
from foundry_fp8.observe.measured_policy import _Search, measure_policy
from foundry_fp8.observe.precision_probe import precision_gap
from tests.surgery.test_policy import Model


def batch(seed=1):
    torch.manual_seed(seed)
    return torch.randn(32, 64), torch.randn(32, 32)


def loss_of(model, pair):
    return (model(pair[0]) - pair[1]).pow(2).mean()


def converted(spike=0.0, **recipe):
    model = Model()
    if spike:
        with torch.no_grad():  # one large element of a weight: under one scale a tensor, the others underflow
            model.blocks[2].up.weight[0, 0] = spike
    foundry_fp8.apply_fp8(model, recipe={"name": "measured", **recipe})
    return model


def test_the_fastest_recipe_for_all_where_all_of_it_is_below_the_limit():
    found = measure_policy(converted(), loss_of, batch(), error=0.3)
    assert {str(d.recipe.name) for d in found.decisions} == {"delayed"} and 0.01 < found.total < 0.3
    assert found.rules() == [{"recipe": "delayed"}]
    assert found.passes == 4  # one to know amaxes; then high precision and the choice
    assert [d.unit for d in found.decisions][:2] == ["layer_000 attention", "layer_000 mlp"]


def test_what_harms_a_block_runs_slower_recipes_or_none_and_the_rest_stays_fast():
    """The damaged layer, and the attention behind it, whose input it blows up; without either of them the limit does not hold."""
    model = converted(spike=400.0)
    found = measure_policy(model, loss_of, batch(), error=0.3)
    slow = {d.unit: d for d in found.decisions if d.recipe is None or d.recipe.name != "delayed"}
    assert list(slow) == ["layer_002 mlp", "layer_003 attention"] and found.total < 0.3
    layers = FP8State.of(model).modules
    for one in slow.values():
        assert one.error > 0.3 and float(one.faster.split()[1].rstrip("%")) > 30
        for name, layer in layers.items():
            back = name in one.layers or found.recipes[name] is not None
            layer.set_recipe(layer.configured_recipe if back else None)
        assert precision_gap(model, loss_of, batch()).worst[1] > 0.3
    assert found.rules() == [
        {"blocks": "range-2-3", "roles": ["mlp"], "recipe": "high_precision"},
        {"blocks": "range-3-4", "roles": ["attention"], "recipe": "high_precision"},
        {"recipe": "delayed"},
    ]


def test_the_rules_to_paste_are_the_choice_and_measure_the_same():
    names = ["current", "block"]
    found = measure_policy(converted(spike=400.0), loss_of, batch(), error=0.25, recipes=names)
    model = Model()
    with torch.no_grad():
        model.blocks[2].up.weight[0, 0] = 400.0
    foundry_fp8.apply_fp8(model, recipe=found.rules())
    layers = FP8State.of(model).modules
    assert {n: layers[n].recipe if n in layers else None for n in found.recipes} == found.recipes
    assert precision_gap(model, loss_of, batch()).worst[1] == pytest.approx(found.total, rel=1e-6)


def test_every_recipe_above_the_limit_is_high_precision_for_all():
    found = measure_policy(converted(), loss_of, batch(), error=1e-4)
    assert not any(found.recipes.values()) and found.rules() == []
    assert "every recipe" in found.summary() and "limit" not in found.summary()


def test_it_leaves_no_trace_and_refuses_a_batch_that_runs_once():
    model = converted()
    loss_of(model, batch()).backward()
    FP8State.of(model).update()
    before = copy.deepcopy(
        [[p.grad for p in model.parameters()], FP8State.of(model).state_dict(), torch.get_rng_state()]
    )
    running = {n: m.recipe for n, m in FP8State.of(model).modules.items()}
    measure_policy(model, loss_of, batch(), error=1e-4)
    torch.set_rng_state(before[2])
    for old, new in zip(before[0], (p.grad for p in model.parameters()), strict=True):
        assert (old is None and new is None) or torch.equal(old, new)
    assert running == {n: m.recipe for n, m in FP8State.of(model).modules.items()}
    with pytest.raises(TypeError, match="can be run once"):
        measure_policy(model, loss_of, iter([batch()]))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recipe": {"name": "measured", "eror": 0.1}}, r"recipe\.eror: unknown key.*Did you mean 'error'"),
        ({"recipe": {"name": "measured", "error": 0}}, r"recipe\.error: 0 is not"),
        ({"recipe": {"name": "measured", "recipes": ["curent"]}}, r"recipes\[0\]: 'curent'.*Did you mean 'current'"),
        ({"recipe": "measured", "attention": True}, r"attention: recipe: measured chooses for linears alone"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        foundry_fp8.apply_fp8(Model(), **options)


@pytest.mark.parametrize("chosen", [True, False])
def test_a_checkpoint_holds_the_choice_and_always_has_the_same_form(chosen, tmp_path):
    model = converted(spike=400.0)
    state = FP8State.of(model)
    keys = {n: list(e) for n, e in state.state_dict()["modules"].items()}, list(state.state_dict()["recipe"])
    if chosen:
        state.choose(measure_policy(model, loss_of, batch(), error=0.3).recipes)
    for seed in range(3):
        loss_of(model, batch(seed)).backward()
    state.update()
    torch.save({"model": model.state_dict(), "fp8": state.state_dict()}, tmp_path / "c")
    saved = torch.load(tmp_path / "c", weights_only=True)
    assert ({n: list(e) for n, e in saved["fp8"]["modules"].items()}, list(saved["fp8"]["recipe"])) == keys
    resumed = converted()
    resumed.load_state_dict(saved["model"])
    theirs = FP8State.of(resumed)
    theirs.load_state_dict(saved["fp8"])
    assert theirs.awaits_choice is not chosen
    assert {n: m.recipe for n, m in theirs.modules.items()} == {n: m.recipe for n, m in state.modules.items()}
    for one in (model, resumed):
        one.zero_grad()
        loss_of(one, batch(5)).backward()
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    plain = Model()
    foundry_fp8.apply_fp8(plain, recipe="delayed")
    with pytest.raises(RuntimeError, match=r"made by the recipe measured, this run uses .*'delayed'"):
        FP8State.of(plain).load_state_dict(saved["fp8"])


def test_histories_that_begin_with_the_choice_are_no_lost_checkpoint(caplog):
    """The optimizer has taken the steps of the warm-up by then."""
    model = converted()
    state, optimizer = FP8State.of(model), torch.optim.AdamW(model.parameters())
    state.reconsider()
    for step in range(4):
        if step == 2:
            state.choose(dict.fromkeys(state.modules, foundry_fp8.DelayedScaling()))
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert state.delayed.amax_history.any() and "no FP8 state was loaded" not in caplog.text


def test_layers_that_do_not_run_delayed_pay_nothing_for_it():
    model = converted()
    state = FP8State.of(model)
    state.choose(dict.fromkeys(state.modules, foundry_fp8.CurrentScaling()))
    before = state.delayed.scale.clone()
    loss_of(model, batch()).backward()
    state.update()
    assert torch.equal(state.delayed.scale, before) and not state.delayed.amax_history.any()
    assert all(module.slots is None for module in state.modules.values())


@pytest.mark.parametrize(
    ("limit", "sizes", "expected"),
    [
        (0.2, (1, 1), {"a": 1, "b": 0}),  # a's next recipe is enough
        (0.08, (1, 1), {"a": 2, "b": 0}),  # it is not
        (0.05, (1, 1), {"a": 2, "b": 1}),
        (0.3, (100, 1), {"a": 0, "b": 2}),  # b costs as much and is a hundredth of the FLOPs
    ],
)
def test_the_search_slows_down_what_costs_most_for_the_flops_that_it_saves(limit, sizes, expected):
    recipes = [foundry_fp8.CurrentScaling(), foundry_fp8.BlockScaling(), None]
    search = _Search({"a": recipes, "b": recipes}, dict(zip("ab", sizes, strict=True)), limit)
    b = (0.3, 0.25) if sizes[0] > 1 else (0.06, 0.03)
    alone = {("a", 0): 0.29, ("a", 1): 0.1, ("b", 0): b[0], ("b", 1): b[1]}
    search.errors = {place: {"layer_000": error} for place, error in alone.items()}

    def measured(pick):
        return sum(alone.get(place, 0.0) ** 2 for place in pick.items()) ** 0.5

    assert search.run(measured) < limit and search.pick == expected
