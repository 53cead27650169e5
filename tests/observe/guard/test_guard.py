"""A damaged layer is found, demoted, and returns to FP8 once the damage is gone: in every host, without a trainer."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import foundry_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from tests.callbacks.conftest import build_llama
from tests.kernels.interpreter import interpret
from tests.model_zoo import TRANSFORMERS_4
from tests.multiprocess import launch
from tests.observe.test_precision_probe import loss_of, tokens

OPTIONS = {"interval": 2, "rows": 4, "quiet_batches": 4}
DAMAGED = range(6, 14)
"""Steps in which one channel of what a layer reads is so large that FP8 loses the others."""


def damage(layer: nn.Module) -> torch.Tensor:
    """What channel 3 of the layer's input is multiplied by: a tensor, so that compiled graphs stay as they are."""
    factor = torch.ones(layer.in_features)
    leave_out_channel(layer)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * factor.to(args[0].dtype),))
    return factor


def leave_out_channel(layer: nn.Module, scale: float = 50.0) -> None:
    """Make high precision compute the same whatever is in channel 3, and the layer matter as much as the rest of the model."""
    with torch.no_grad():
        layer.weight *= scale
        layer.weight[:, 3] = 0.0
    kept = torch.ones(layer.in_features)
    kept[3] = 0.0
    if layer.weight.requires_grad:
        layer.weight.register_hook(lambda gradient: gradient * kept)


def train(model, factor, steps=28, guard=None, every=DAMAGED, ids=None, **options):
    """The plain loop, at a rate of 0; the guard."""
    guard = guard or foundry_fp8.DivergenceGuard(model, loss_of, **OPTIONS | options)
    for step in range(guard.batch, steps):
        factor[3] = 1e6 if step in every else 1.0
        batch = tokens(seed=step) if ids is None else ids(step)
        guard.before_step(batch)
        loss = loss_of(model, batch)
        loss.backward()
        model.zero_grad(set_to_none=True)
        guard.after_step(loss.detach())
    return guard


def moves(guard):
    return [(e["batch"], e["unit"], e["action"]) for e in guard.events if e["action"] != "alarm"]


def check(guard, unit):
    found = [(batch, action) for batch, name, action in moves(guard) if unit in name]
    assert [action for _, action in found] == ["demote", "return"], guard.events
    assert DAMAGED.start <= found[0][0] <= DAMAGED.start + 2
    assert found[1][0] >= DAMAGED.stop + 2
    assert guard.demoted == []
    innocent = [name for _, name, action in moves(guard) if action == "demote" and unit not in name]
    assert len(innocent) <= 1, guard.events


def llama(recipe="delayed", **options):
    model = build_llama().train()
    foundry_fp8.apply_fp8(model, recipe=recipe, **{"backend": "emulated"} | options)
    return model, model.model.layers[1].mlp.down_proj, "layers.1.mlp.down_proj"


def compiled():
    model, layer, unit = llama("current")
    return torch.compile(model, backend="aot_eager"), layer, unit


def mixtral():
    if not TRANSFORMERS_4:
        pytest.skip("transformers 5 keeps experts in one parameter, of which none is damaged alone")
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )).train()  # fmt: skip
    foundry_fp8.apply_fp8(model, recipe="current", backend="emulated")
    return model, model.model.layers[1].block_sparse_moe.experts[2].w2, "experts.2.w2"


def lora():
    import peft

    config = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(build_llama(), config).train()
    foundry_fp8.apply_fp8(model, recipe="current", backend="emulated")
    unit = "layers.1.mlp.down_proj.base_layer"
    return model, model.get_submodule(f"base_model.model.model.{unit}"), unit


HOSTS = {
    "delayed": llama,
    "block": lambda: llama("block"),
    "attention": lambda: llama("current", attention=True),
    "native": lambda: llama("current", backend="native"),
    "compiled": compiled,
    "mixtral": mixtral,
    "lora": lora,
}


@pytest.mark.parametrize(
    "host",
    [
        pytest.param(host, marks=[] if host in ("delayed", "compiled", "lora") else [pytest.mark.full])
        for host in HOSTS
    ],
)
def test_a_damaged_layer_is_demoted_while_it_lasts(host, monkeypatch):
    if host == "native":
        interpret(monkeypatch)
    model, layer, unit = HOSTS[host]()
    ids = (
        (lambda step: tokens(seed=2)) if host == "mixtral" else None
    )  # tokens of other experts are another error
    check(train(model, damage(layer), finer=False, ids=ids), unit)


def test_an_attention_with_an_outlier_in_its_queries_is_demoted_and_its_linears_are_not():
    model, _, _ = llama("current", attention=True)
    attention = model.model.layers[1].self_attn
    factor, kept = torch.ones(32), torch.ones(16)
    kept[[1, 5]] = 0.0  # two channels that rotary embeddings turn into each other; no key has them

    class Pair(dict):
        def __setitem__(self, key, value):
            factor[[1, 5]] = value

    with torch.no_grad():
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.weight *= 10.0
    attention.q_proj.register_forward_hook(lambda module, args, output: output * factor)
    attention.k_proj.register_forward_hook(lambda module, args, output: output * kept)
    check(train(model, Pair()), "layers.1.self_attn.fp8_attention")


def on_two_ranks():
    dist.init_process_group("gloo")
    model, layer, unit = llama("delayed")
    factor = damage(layer)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    rank = dist.get_rank()
    guard = train(model, factor, finer=False, ids=lambda step: tokens(seed=2 * step + rank))
    dist.barrier()
    check(guard, unit)
    return guard.events


@pytest.mark.multiprocess
def test_under_fsdp2_two_ranks_find_and_do_the_same():
    first, second = launch.call(
        on_two_ranks, 2, imports=f"{launch.FSDP},transformers,tests.kernels.interpreter"
    )
    assert str(first) == str(second)


def test_a_finer_recipe_is_enough_where_one_token_sets_the_scale_of_all():
    """Block scaling gives each row a scale of its own."""
    model, layer, unit = llama("current")
    rows = torch.ones(16, 1)
    leave_out_channel(layer, 20.0)

    class Row(dict):
        def __setitem__(self, key, value):
            rows[5] = value

    channel = torch.zeros(layer.in_features)
    channel[3] = 1.0
    layer.register_forward_pre_hook(lambda module, args: (args[0] * (1 + channel * (rows - 1)),))
    guard = train(model, Row(), steps=10, every=range(6, 10), ids=lambda step: tokens(seed=8))
    assert {(e["unit"].endswith(unit), e["signal"]) for e in guard.events if e["action"] == "demote"} == {
        (True, "current -> block")
    }


def test_warn_demotes_nothing_and_stop_says_so():
    model, layer, _ = llama()
    factor = damage(layer)
    guard = train(model, factor, steps=DAMAGED.stop, actions=["warn"])
    assert moves(guard) == [] and len(guard.events) > 2
    event = guard.events[0]
    assert event["value"] > event["threshold"]
    model, layer, _ = llama()
    guard = train(model, damage(layer), steps=12, actions=["stop"])
    assert ("model", "stop") in {(e["unit"], e["action"]) for e in guard.events}


@pytest.mark.parametrize("stops", [(11, 18), pytest.param((8, 15), marks=pytest.mark.full)], ids=str)
def test_it_resumes_bit_exactly_with_layers_demoted(stops):
    """In a new model, from before and after a layer is demoted and returns."""
    model, layer, _ = llama()
    factor, whole, saved = damage(layer), None, []
    for stop in stops:
        whole = train(model, factor, steps=stop, guard=whole)
        saved.append(copy.deepcopy((FP8State.of(model).state_dict(), whole.state_dict(), whole.demoted)))
    train(model, factor, guard=whole)
    for fp8, state, demoted in saved:
        model, layer, _ = llama()
        FP8State.of(model).load_state_dict(fp8)
        again = foundry_fp8.DivergenceGuard(model, loss_of, **OPTIONS)
        again.load_state_dict(state)
        assert again.demoted == demoted
        train(model, damage(layer), guard=again)
        assert str(again.events) == str(whole.events)
        assert str(again.state_dict()) == str(whole.state_dict())


def test_state_of_an_older_guard_or_of_other_layers_is_one_warning(caplog):
    model, _, _ = llama()
    guard = foundry_fp8.DivergenceGuard(model, loss_of)
    for state in ({"decision": {}}, {**guard.state_dict(), "recipes": {"other": "current"}}):
        caplog.clear()
        guard.load_state_dict(state)
        assert len(caplog.records) == 1 and "starts anew" in caplog.text
    assert guard.demoted == []


def test_a_saved_finer_recipe_that_is_not_among_the_options_now_becomes_high_precision():
    model, layer, _ = llama()
    guard = foundry_fp8.DivergenceGuard(model, loss_of)
    layer.set_recipe(foundry_fp8.CurrentScaling())
    state = guard.state_dict()
    again = foundry_fp8.DivergenceGuard(model, loss_of, finer=False)
    again.load_state_dict(state)
    assert layer.recipe is None


def test_memory_that_runs_out_leaves_fewer_rows_and_then_none(caplog):
    model, _, _ = llama()
    seen = []

    def without_memory(model, ids):
        seen.append(len(ids))
        raise torch.OutOfMemoryError("out of memory")

    guard = foundry_fp8.DivergenceGuard(model, without_memory, **OPTIONS)
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            assert guard.before_step(tokens()) == []
            guard.after_step(1.0)
    assert set(seen) == {4, 2, 1} and not guard.due()
    assert "goes on with 2 rows" in caplog.text and "not measured any more" in caplog.text


def test_a_model_without_fp8_layers_is_one_warning(caplog):
    guard = foundry_fp8.DivergenceGuard(build_llama().train(), loss_of, interval=1)
    for _ in range(4):
        guard.before_step(tokens())
        guard.after_step(1.0)
    assert guard.events == [] and sum("no FP8 layer" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("options", [{"interval": 0}, {"loss_limit": 0.0}, {"gradient_limit": -1}, {"rows": 0}, {"finer": "delayed"}])  # fmt: skip
def test_options_that_are_not_valid(options):
    with pytest.raises(ConfigError, match=f"divergence_guard.*{next(iter(options))}|{next(iter(options))}"):
        foundry_fp8.DivergenceGuard(llama()[0], loss_of, **options)


def test_a_batch_without_rows_is_refused():
    guard = foundry_fp8.DivergenceGuard(llama()[0], loss_of, interval=1)
    guard.after_step(1.0)
    with pytest.raises(TypeError, match="no tensor"):
        guard.before_step("text")


def test_parts_of_a_batch():
    from foundry_fp8.observe.precision_probe import first_rows

    ids = tokens(4)
    assert torch.equal(first_rows(ids, 3), ids[:3])
    cut = first_rows({"ids": ids, "names": ["a", "b", "c", "d"], "scale": torch.tensor(2.0), "kind": "x"}, 2)
    assert torch.equal(cut["ids"], ids[:2]) and cut["names"] == ["a", "b"]
    assert float(cut["scale"]) == 2.0 and cut["kind"] == "x"
    assert [len(part) for part in first_rows((ids, ids), 1)] == [1, 1]


def test_no_more_passes_than_its_price_says():
    """Two passes a measurement in a healthy run, and none in other batches."""
    model, layer, _ = llama()
    guard = train(model, damage(layer), steps=41, every=(), interval=20)
    assert guard.probe.passes == 4
    assert not [m for m in model.modules() if isinstance(m, FP8Linear) and m.probe]


@pytest.mark.parametrize("budget", [6, 20])
def test_an_alarm_that_no_demotion_satisfies_has_a_budget_of_passes_and_one_line(budget, monkeypatch, caplog):
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(60)))
    foundry_fp8.apply_fp8(model, recipe="current", backend="emulated", include=["*"])
    guard = foundry_fp8.DivergenceGuard(model, lambda model, batch: model(batch).sum(), passes=budget)
    monkeypatch.setattr(guard, "severity", lambda gap: 9.0)
    guard.batch = 20
    with caplog.at_level(logging.WARNING):
        found = guard.before_step(torch.randn(4, 32))
    assert guard.probe.passes <= budget
    assert len(found) > 30 and len(guard.events) == len(found)
    lines = [record.message for record in caplog.records if "divergence_guard" in record.message]
    assert len(lines) == 1 and f"and {len(found) - 4} more" in lines[0] and "alarm" in lines[0]


def test_an_error_after_the_first_measurement_switches_it_off_and_training_goes_on(caplog):
    """One in the first is raised: nothing has been spent, and what is asked for is wrong."""
    calls = []

    def fails_later(model, ids):
        calls.append(len(ids))
        if len(calls) > fails_from:
            raise ValueError("a batch of another kind")
        return loss_of(model, ids)

    for fails_from in (0, 2):
        calls.clear()
        guard = foundry_fp8.DivergenceGuard(llama()[0], fails_later, **{**OPTIONS, "interval": 1})
        guard.after_step(1.0)
        if not fails_from:
            with pytest.raises(ValueError, match="another kind"):
                guard.before_step(tokens())
            continue
        for _ in range(3):
            guard.before_step(tokens())
            guard.after_step(1.0)
        assert guard.failed == "ValueError: a batch of another kind" and not guard.due()
        assert len(calls) == 4 and caplog.text.count("callbacks.divergence_guard failed and is off") == 1
