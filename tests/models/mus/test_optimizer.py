"""Learning rates and weight decay by group, and what is refused."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from composer.core import Event
from composer.loggers import InMemoryLogger, Logger
from composer.optim import DecoupledAdamW
from llmfoundry.optim import DecoupledLionW
from torch import nn

from foundry_fp8.algorithms.unit_scaling import UnitScaling
from foundry_fp8.config import ConfigError
from foundry_fp8.models.mus.apply import apply_unit_scaling
from foundry_fp8.models.mus.optimizer import check_groups, check_schedulers, scale_groups
from foundry_fp8.models.mus.structure import unit_scaled
from tests.models.mus.test_modeling import small

OPTIMIZERS = [DecoupledLionW, DecoupledAdamW, torch.optim.AdamW]


def scaled(kind, base_width=16, lr=0.5, weight_decay=1e-4, model=None):
    model = small() if model is None else model
    optimizer = kind(model.parameters(), lr=lr, weight_decay=weight_decay)
    described = unit_scaled(model)
    assert scale_groups(optimizer, model, described, base_width) == 0.5
    return model, optimizer, described


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_hidden_weights_alone_get_the_width_rule_and_schedulers_keep_it(kind):
    model, optimizer, described = scaled(kind)
    names = {id(p): n for n, p in model.named_parameters()}
    hidden, other = optimizer.param_groups
    assert {names[id(p)] for p in hidden["params"]} == {
        f"model.layers.{i}.{part}.weight"
        for i in range(2)
        for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    }
    assert {names[id(p)].split(".")[-2] for p in other["params"]} == {"embed_tokens", "lm_head", "attention_norm", "mlp_norm", "norm"}  # fmt: skip
    assert (hidden["lr"], other["lr"]) == (0.25, 0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model(torch.randint(0, 96, (2, 8))).logits.square().sum().backward()
    optimizer.step(), schedule.step()
    assert hidden["lr"] / other["lr"] == 0.5 and other["lr"] == 0.25
    check_groups(optimizer, model, described)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weight_decay_does_not_depend_on_the_width(kind):
    """A step without gradients is decay alone: the same factor for a weight of the base width and of four times it."""
    found = {}
    for base_width in (64, 16):
        model = small()
        optimizer = kind(model.parameters(), lr=0.5, weight_decay=1e-4)
        scale_groups(optimizer, model, unit_scaled(model), base_width)
        weight = model.model.layers[0].mlp.up_proj.weight
        before = weight.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        found[base_width] = float((before - weight.detach()).norm() / before.norm())
    assert found[64] > 0 and found[16] == pytest.approx(found[64], rel=1e-3)


def test_groups_of_the_yaml_are_split_and_keep_what_they_say():
    model = small()
    norms = [p for p in model.parameters() if p.dim() == 1]
    rest = [p for p in model.parameters() if p.dim() == 2]
    optimizer = DecoupledAdamW(
        [{"params": rest}, {"params": norms, "weight_decay": 0.0}], lr=0.5, weight_decay=1e-4
    )
    scale_groups(optimizer, model, unit_scaled(model), 16)
    assert [(g["unit_scaling"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("hidden", 0.25, 1e-4),
        ("other", 0.5, 1e-4),
        ("other", 0.5, 0.0),
    ]


def test_what_cannot_be_right_is_refused():
    model, optimizer, described = scaled(DecoupledAdamW)
    with pytest.raises(
        ConfigError, match=r"algorithms\.unit_scaling: the optimizer's groups are scaled already"
    ):
        scale_groups(optimizer, model, described, 16)
    with pytest.raises(ConfigError, match="the optimizer SGD has no known rule"):
        scale_groups(torch.optim.SGD(model.parameters(), lr=1.0), model, described, 16)
    with pytest.raises(ConfigError, match="the model is not µnit-scaled"):
        unit_scaled(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(
        ConfigError, match=r"multiplies by 1, not by 1/sqrt\(256\).*Remove model.hidden_multiplier"
    ):
        unit_scaled(small(hidden_multiplier=1.0))  # as an exported checkpoint's
    with pytest.raises(ConfigError, match=r"unit_scaling\.base_width"):
        UnitScaling(base_width=0)
    hidden, other = optimizer.param_groups
    other["params"].append(hidden["params"].pop())
    with pytest.raises(
        RuntimeError, match=r"down_proj\.weight is hidden and the optimizer has it in the group 'other'"
    ):
        check_groups(optimizer, model, described)


def test_the_algorithm_checks_when_training_starts_that_its_groups_survived():
    model = small()
    optimizer = DecoupledAdamW(model.parameters(), lr=0.5)
    state = SimpleNamespace(model=model, optimizers=[optimizer], schedulers=[])
    algorithm = UnitScaling(base_width=16)
    logged = InMemoryLogger()
    for event in (Event.INIT, Event.FIT_START):
        assert algorithm.match(event, state)
        algorithm.apply(event, state, Logger(state, destinations=[logged]))
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
    facts = {"base_width": 16, "width": 64, "tau": [0.4], "final_norm": True, "hidden_lr_factor": 0.5}
    assert logged.hyperparameters["unit_scaling"] == facts
    optimizer.param_groups[:] = DecoupledAdamW(model.parameters(), lr=0.5).param_groups
    with pytest.raises(RuntimeError, match=r"unit_scaling: .* and the optimizer has it in the group None"):
        algorithm.apply(Event.FIT_START, state, Logger(state))


def test_a_resumed_run_agrees_on_base_width_and_tau():
    algorithm = UnitScaling(base_width=16)
    algorithm._described = unit_scaled(small(tau=0.3))
    state = copy.deepcopy(algorithm.state_dict())
    algorithm.load_state_dict(state)
    for change, said in (({"base_width": 32}, "base_width 32"), ({"tau": [0.4]}, r"tau \[0.4\]"), ({"width": 128}, "width 128")):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"trained with {said}"):
            algorithm.load_state_dict({**state, **change})


S = torch.optim.lr_scheduler
MADE = {
    "StepLR": lambda o: S.StepLR(o, 2), "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 4]), "LinearLR": S.LinearLR,
    "ConstantLR": S.ConstantLR, "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9), "PolynomialLR": S.PolynomialLR,
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 20), "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=1),
    "LambdaLR": lambda o: S.LambdaLR(o, lambda step: min(1, step / 3)),
    "get_cosine_schedule_with_warmup": lambda o: transformers.get_cosine_schedule_with_warmup(o, 3, 12),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda step: 0.9),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 5),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.LinearLR(o), S.CosineAnnealingLR(o, 6)], [4]),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.LinearLR(o), S.LambdaLR(o, lambda step: 1 / (1 + step))]),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.5, 40), "CyclicLR": lambda o: S.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.1), "a floor": lambda o: S.CosineAnnealingLR(o, 6, eta_min=0.1),
    "a floor of a plateau": lambda o: S.ReduceLROnPlateau(o, patience=1, min_lr=0.1),
}  # fmt: skip
ABSOLUTE = {"OneCycleLR", "CyclicLR", "SWALR", "a floor", "a floor of a plateau"}
BEFORE = {"LambdaLR", "get_cosine_schedule_with_warmup", "MultiplicativeLR", "CosineAnnealingWarmRestarts", "SequentialLR",
          "ChainedScheduler"}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:The epoch parameter in")
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("before", [True, False])
def test_a_scheduler_keeps_the_ratio_or_is_refused_by_name(name, before):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = MADE[name](optimizer) if before else None
    state = SimpleNamespace(model=model, optimizers=[optimizer], schedulers=[])
    algorithm = UnitScaling(base_width=16)
    algorithm.apply(Event.INIT, state, Logger(SimpleNamespace(run_name="a")))
    scheduler = scheduler or MADE[name](optimizer)
    state.schedulers = [scheduler]
    if name in ABSOLUTE | (BEFORE if before else set()):
        with pytest.raises(ConfigError, match=r"does not keep the ratio.*apply_unit_scaling"):
            algorithm.apply(Event.FIT_START, state, None)
        return
    algorithm.apply(Event.FIT_START, state, None)
    for step in range(10):
        scheduler.step(*([1.0] if "Plateau" in name else []))
        rates = {group["unit_scaling"]: group["lr"] for group in optimizer.param_groups}
        assert rates["hidden"] == pytest.approx(0.5 * rates["other"]), step


def test_rates_of_each_group_keep_the_ratio_under_one_cycle():
    _, optimizer, _ = scaled(torch.optim.AdamW)
    scheduler = S.OneCycleLR(optimizer, [0.25, 0.5], 40)
    check_schedulers([scheduler], [0.25, 0.5])
    optimizer.step(), scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * optimizer.param_groups[1]["lr"])


def test_in_a_loop_the_scheduler_comes_after():
    for make in (
        MADE["LambdaLR"],
        MADE["get_cosine_schedule_with_warmup"],
        MADE["SequentialLR"],
        MADE["StepLR"],
    ):
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        make(optimizer)
        with pytest.raises(ConfigError, match="a scheduler was made for the optimizer already"):
            apply_unit_scaling(model, optimizer, base_width=16)
        assert len(optimizer.param_groups) == 1


def test_adam_without_decay_is_adamw_and_with_it_is_refused():
    ends = []
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        torch.manual_seed(0)
        model, optimizer, _ = scaled(kind, weight_decay=0.0)
        model(
            torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(0))
        ).logits.square().sum().backward()
        optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *ends))
    with pytest.raises(ConfigError, match="Adam with weight_decay 0"):
        scaled(torch.optim.Adam)
