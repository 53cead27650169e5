"""``training_state``: a run that is stopped and resumed is the run that was not, and what a checkpoint lacks is named."""

from __future__ import annotations

import collections
import copy

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp

import foundry_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.state import FP8State
from foundry_fp8.planning.memory import planner
from tests.callbacks.conftest import build_llama
from tests.observe.test_precision_probe import loss_of, tokens

STRICT = {"interval": 2, "rows": 2, "gradient_limit": 0.05, "finer": False}
"""A guard that takes layers out of FP8 in its first measurements."""
STEPS, SAVED_AFTER = 7, 4


class Run:
    """A plain loop with a guard."""

    def __init__(self, recipe="delayed", guard=True, closure=False, **options):
        self.closure = closure  # the forward runs within the optimizer's step, as in Composer
        self.model = build_llama().train()
        foundry_fp8.apply_fp8(self.model, recipe=recipe, backend="emulated", **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.guard = foundry_fp8.DivergenceGuard(self.model, loss_of, **STRICT) if guard else None
        self.state = foundry_fp8.training_state(self.model, guard=self.guard)
        self.losses = []

    def train(self, begin, end):
        for step in range(begin, end):
            if self.guard is not None:
                self.guard.before_step(tokens(seed=step))

            def forward_backward(step=step):
                loss = loss_of(self.model, tokens(seed=step))
                loss.backward()
                return loss

            if self.closure:
                loss = self.optimizer.step(forward_backward)
            else:
                loss = forward_backward()
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if self.guard is not None:
                self.guard.after_step(loss.detach())
        return self

    def everything(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "fp8": self.state.state_dict(),
        }

    def load(self, saved, *, fp8=True):
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if fp8:
            self.state.load_state_dict(saved["fp8"])
        return self


def same(ours, theirs):
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return repr(ours) == repr(theirs)  # NaN too


def through_torch_save(state, folder):
    torch.save(state, folder / "saved.pt")
    return torch.load(folder / "saved.pt", weights_only=True)


def through_distributed_checkpoint(state, folder):
    """As a Stateful; into a run that holds other values, no guard's events among them."""
    dcp.save(state, checkpoint_id=folder)
    fresh = Run().train(0, 1).everything()
    dcp.load(fresh, checkpoint_id=folder)
    return fresh


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)  # torch's own code
@pytest.mark.parametrize(
    "through", [pytest.param(through_torch_save, marks=pytest.mark.full), through_distributed_checkpoint]
)
def test_a_resumed_run_is_the_run_that_was_not_stopped(through, tmp_path, caplog):
    whole = Run().train(0, STEPS)
    first = Run().train(0, SAVED_AFTER)
    assert first.guard.demoted and FP8State.of(first.model).delayed.amax_history.any()
    resumed = Run().load(through(first.everything(), tmp_path)).train(SAVED_AFTER, STEPS)
    assert resumed.losses == whole.losses[SAVED_AFTER:]
    assert same(resumed.everything(), whole.everything())
    assert "no FP8 state was loaded" not in caplog.text


@pytest.mark.parametrize("closure", [pytest.param(False, marks=pytest.mark.full), True])
def test_without_the_state_it_is_another_run_and_says_so_once(closure, tmp_path, caplog):
    whole = Run(guard=False, closure=closure).train(0, STEPS)
    assert caplog.text == ""
    saved = through_torch_save(Run(guard=False, closure=closure).train(0, SAVED_AFTER).everything(), tmp_path)
    resumed = Run(guard=False, closure=closure).load(saved, fp8=False).train(SAVED_AFTER, STEPS)
    assert resumed.losses != whole.losses[SAVED_AFTER:]
    assert caplog.text.count("no FP8 state was loaded") == 1


def test_a_recipe_without_state_and_a_first_step_on_zeros_warn_of_nothing(tmp_path, caplog):
    saved = through_torch_save(Run("current", guard=False).train(0, 2).everything(), tmp_path)
    Run("current", guard=False).load(saved, fp8=False).train(2, 3)
    fresh = Run(guard=False)
    fresh.optimizer.step()  # as torch.distributed.checkpoint makes an optimizer's states: before any forward
    fresh.load(through_torch_save(Run(guard=False).train(0, 2).everything(), tmp_path)).train(2, 3)
    assert caplog.text == ""


def test_another_recipe_and_a_foreign_state_are_refused(tmp_path):
    saved = Run(guard=False).train(0, 1).everything()
    with pytest.raises(RuntimeError, match=r"made by the recipe .*delayed.*this run uses .*current"):
        Run("current", guard=False).load(saved)
    with pytest.raises(RuntimeError, match=r"no state of foundry_fp8.training_state"):
        Run().state.load_state_dict({"fp8": {}})
    with pytest.raises(ConfigError, match="not converted"):
        foundry_fp8.training_state(build_llama())


@pytest.mark.parametrize(
    ("saved", "here", "said"),
    [(False, True, "the guard: its counters"), (True, False, "this run has no guard")],
)
def test_a_guard_on_one_side_alone_is_named(saved, here, said, caplog):
    state = Run(guard=saved).train(0, 1).everything()
    Run(guard=here).load(state).train(1, 2)
    assert caplog.text.count(said) == 1


def test_attention_and_the_memory_plan_are_part_of_it(caplog):
    def run():
        model = build_llama().train()
        foundry_fp8.apply_fp8(model, recipe="delayed", backend="emulated", attention=True)
        setattr(model, planner.PLAN, {"activation_compression": {"targets": {"model.layers.0": "exact"}}})
        loss_of(model, tokens()).backward()
        return foundry_fp8.training_state(model)

    state = run().state_dict()
    parts = state["state"][0]
    assert parts["attention"]["modules"]
    second = run()
    second.load_state_dict(state)
    assert same(second.state_dict(), state)
    assert caplog.text == ""
    parts["plan"] = None
    second.load_state_dict(state)
    assert "The checkpoint's memory plan is None" in caplog.text


class Parts(torch.nn.Module):
    """Called as a whole, converted in parts."""

    def __init__(self, *recipes):
        super().__init__()
        torch.manual_seed(0)
        self.parts = torch.nn.ModuleList(block(2) for _ in recipes)
        for part, recipe in zip(self.parts, recipes, strict=True):
            foundry_fp8.apply_fp8(part, recipe=recipe, backend="emulated")

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


def block(depth=1):
    layers = [
        torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))
        for _ in range(depth)
    ]
    return torch.nn.Sequential(*layers)


def converted(depth):
    torch.manual_seed(0)
    model = block(depth)
    foundry_fp8.apply_fp8(model, recipe="delayed", backend="emulated")
    return model


def repeated():
    model = converted(2)
    return model.extend([copy.deepcopy(model[1]), copy.deepcopy(model[0])])


def replaced():
    model = converted(3)
    model[1] = copy.deepcopy(model[2])
    return model


def with_modules_to_save(before=False):
    model = torch.nn.Sequential(collections.OrderedDict(body=block(2), last=block()))
    torch.nn.init.normal_(model.last[0][0].weight, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["body.0.0"], modules_to_save=["last"])
    model = peft.get_peft_model(model, config) if before else model
    foundry_fp8.apply_fp8(model, recipe="delayed", backend="emulated")
    return model if before else peft.get_peft_model(model, config)


PARTED = {
    "two parts": lambda: Parts("delayed", "delayed"),
    "three recipes": lambda: Parts("delayed", "current", {"name": "delayed", "margin": 1}),
    "a copied part": lambda: torch.nn.Sequential(model := Parts("delayed"), copy.deepcopy(model)),
    "modules_to_save, then FP8": lambda: with_modules_to_save(before=True),
}
COPIED = {"modules_to_save": with_modules_to_save, "a repeated block": repeated, "a replaced block": replaced,
          "a repeated layer": lambda: torch.nn.Sequential(model := converted(1), copy.deepcopy(model[0][2]))}  # fmt: skip


@pytest.mark.parametrize("make", PARTED.values(), ids=PARTED)
def test_the_state_follows_every_part_that_is_there(make, tmp_path, caplog):
    def run(begin, end, saved=None):
        torch.manual_seed(5)
        model = make().train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        state, losses = foundry_fp8.training_state(model), []
        if saved is not None:
            for part, value in zip((model, optimizer, state), saved, strict=True):
                part.load_state_dict(value)
        for step in range(begin, end):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)) * (1 + step)
            losses.append(model(x).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses, [model.state_dict(), optimizer.state_dict(), state.state_dict()]

    losses, whole = run(0, 6)
    resumed, again = run(3, 6, through_torch_save(run(0, 3)[1], tmp_path))
    assert losses[3:] == resumed and same(whole, again)
    assert caplog.text == ""


def test_a_state_with_parts_that_are_not_here_is_refused_by_name():
    saved = foundry_fp8.training_state(PARTED["two parts"]()).state_dict()
    with pytest.raises(RuntimeError, match=r"state of other parts \(fp8 of parts.0, fp8 of parts.1\)"):
        foundry_fp8.training_state(converted(2)).load_state_dict(saved)


@pytest.mark.parametrize("make", COPIED.values(), ids=COPIED)
def test_layers_that_were_copied_after_the_conversion_are_named(make):
    with pytest.raises(ConfigError, match=r"layers .* were copied after the conversion"):
        foundry_fp8.training_state(make())
