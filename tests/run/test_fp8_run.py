"""One run, whatever the trainer: a plain loop measures, guards and watches as Composer does, and all checkpoints are alike."""

from __future__ import annotations

import pytest
import torch
from composer import Trainer
from composer.models import ComposerModel

import foundry_fp8
from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.state import FP8State
from foundry_fp8.run.training_state import FP8Parts
from foundry_fp8.surgery.attention import FP8AttentionState
from tests.callbacks.conftest import build_llama
from tests.integrations.test_training_state import STRICT, same
from tests.observe.test_precision_probe import loss_of, tokens

MEASURED = {"name": "measured", "warmup": 2, "error": 0.5, "recipes": ["current"]}


class Loop:
    """A plain loop."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = build_llama().train()
        self.run = foundry_fp8.FP8Run(backend="emulated", announce=False, **options)
        self.run.convert(self.model, precision="fp32")
        self.run.start(self.model, loss_of)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.logged, self.recipes = {}, []

    def train(self, end):
        while self.run.step < end:
            batch = tokens(seed=self.run.step)
            self.optimizer.zero_grad()
            self.run.begin_step(batch)
            self.recipes.append(
                {layer.recipe and layer.recipe.name for layer in FP8State.of(self.model).modules.values()}
            )
            loss = loss_of(self.model, batch)
            loss.backward()
            self.optimizer.step()
            self.logged |= self.run.end_step(loss.detach())
        return self

    def saved(self, folder):
        parts = (self.model, self.optimizer, self.run)
        torch.save([part.state_dict() for part in parts], folder / "saved.pt")
        return torch.load(folder / "saved.pt", weights_only=True)

    def load(self, saved):
        for part, state in zip((self.model, self.optimizer, self.run), saved, strict=True):
            part.load_state_dict(state)
        return self


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"recipe": MEASURED}, marks=pytest.mark.full),
        {"recipe": "delayed", "guard": STRICT},
        {"recipe": MEASURED, "guard": {"interval": 3}},
    ],
    ids=["measured", "guard", "both"],
)
def test_a_plain_loop_measures_and_guards_and_goes_on_bit_for_bit(options, tmp_path):
    whole = Loop(**options)
    saved = [whole.train(at).saved(tmp_path) for at in (1, 4)]
    whole.train(6)
    for state in saved:
        resumed = Loop(**options).load(state).train(6)
        assert same(whole.model.state_dict(), resumed.model.state_dict())
        assert same(whole.run.state_dict(), resumed.run.state_dict())
    if "guard" not in options:
        assert (
            whole.recipes == [{None}] * 2 + [{"current"}] * 4 and whole.run.report.recipe_names == "current"
        )
    elif options["recipe"] == "delayed":
        assert whole.run.guard.demoted and whole.logged["guard/alarms"] > 0


def test_what_a_plain_loop_runs_is_reported_and_monitors_log():
    monitors = {
        "mfu": {"interval": 2, "peak_flops": {"fp8": 4e12, "fp32": 1e12, "bf16": 2e12}},
        "health": {"interval": 2},
    }
    loop = Loop(recipe="current", monitors=monitors)
    converted = loop.run.report
    loop.train(4)
    assert loop.run.report is not converted and {row.precision for row in loop.run.report.rows} == {
        "fp8",
        "fp32",
    }
    assert loop.logged["mfu/mfu"] > 0 and "fp8/sqnr_db/dy/worst" in loop.logged


def test_what_a_plain_loop_cannot_run_is_refused():
    run = foundry_fp8.FP8Run(recipe="measured", announce=False)
    with pytest.raises(ConfigError, match="wrapped or compiled already"):
        run.convert(torch.compile(build_llama()))
    model = build_llama().train()
    run.convert(model)
    with pytest.raises(ConfigError, match=r"need loss_of\(model, batch\)"):
        run.start(model)
    with pytest.raises(ConfigError, match=r"FP8Run\.guard"):
        foundry_fp8.FP8Run(guard={"interval": 0})


class Wrapped(ComposerModel):
    def __init__(self):
        super().__init__()
        self.model = build_llama()

    def forward(self, batch):
        return self.model(**batch).logits

    def loss(self, outputs, batch):
        return torch.nn.functional.cross_entropy(
            outputs[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
        )


def of_composer(attention=False):
    algorithm = FP8(recipe="delayed", backend="emulated", announce=False, attention=attention)
    model = Wrapped()
    Trainer(model=model, algorithms=[algorithm], device="cpu", progress_bar=False).close()
    return algorithm, model


def trained_state(attention=False):
    """A model's state with amaxes, and that of attention."""
    _, model = of_composer(attention)
    batch = {"input_ids": tokens()}
    model.train().loss(model(batch), batch).backward()
    FP8Parts(model).finish_pass()
    found = FP8AttentionState.of(model)
    return FP8State.of(model).state_dict(), None if found is None else found.state_dict()


@pytest.mark.parametrize("attention", [False, True])
def test_states_of_both_older_forms_load_in_every_trainer(attention, caplog):
    """As Composer's algorithm wrote it, its keys beside each other; as ``training_state`` did; and as Composer's does now."""
    fp8, of_attention = trained_state(attention)
    parts = {"fp8": fp8, **({"attention": of_attention} if attention else {})}
    forms = [
        {"repr": "FP8(recipe='delayed')", **fp8, **({"attention": of_attention} if attention else {})},
        {"state": ({**parts, "plan": None, "ways": []},)},
        {"repr": "FP8(recipe='delayed')", "state": (parts,)},
    ]
    for state in forms:
        algorithm, _ = of_composer(attention)
        algorithm.load_state_dict(state)
        (found,) = algorithm.state_dict()["state"]
        assert same(found, parts)
        converted = of_composer(attention)[1]
        foundry_fp8.training_state(converted).load_state_dict(state)
        assert same(FP8State.of(converted).state_dict(), fp8)
    assert caplog.text == ""
