"""FP8 state that is not as it was saved is refused by name, and changes nothing."""

import copy
import math

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.layers.state import FP8State


def trained(steps=4, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    foundry_fp8.apply_fp8(model, **{"recipe": "delayed", "backend": "emulated", "include": ["*"], **options})
    for _ in range(steps):
        model(torch.randn(16, 32)).square().mean().backward()
    FP8State.of(model).update()
    return model


def flip(tensor, index, bit):
    """One bit of a float32."""
    bits = tensor.view(torch.int32)
    bits[index] ^= 1 << bit


def set_dtype(entry, part):
    entry[part] = entry[part].double()


DAMAGE = {
    "an exponent's highest bit in a history": lambda e: flip(e["amax_history"], (-1, 0), 30),
    "another bit in an older amax": lambda e: flip(e["amax_history"], (-2, 1), 25),
    "a mantissa's bit in a scale": lambda e: flip(e["scale"], (2,), 22),
    "NaN in a history": lambda e: e["amax_history"].fill_(math.nan),
    "a negative amax": lambda e: e["amax_history"].neg_(),
    "an infinite scale": lambda e: e["scale"].fill_(math.inf),
    "scales of another dtype": lambda e: set_dtype(e, "scale"),
    "a history of another dtype": lambda e: set_dtype(e, "amax_history"),
    "a list": lambda e: e.update(scale=e["scale"].tolist()),
    "a shorter history": lambda e: e.update(amax_history=e["amax_history"][1:]),
    "no scale": lambda e: e.pop("scale"),
}


@pytest.mark.parametrize("checksum", [True, False], ids=["with a checksum", "as older versions saved it"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entries_are_refused_with_the_name_of_the_layer(damage, checksum):
    if not checksum and damage in ("another bit in an older amax", "a mantissa's bit in a scale"):
        pytest.skip("nothing in the state contradicts it")
    model = trained()
    state = FP8State.of(model)
    before = copy.deepcopy(state.state_dict())
    damaged = copy.deepcopy(before)
    for entry in damaged["modules"].values():
        entry.pop("checksum", None) if not checksum else None
    DAMAGE[damage](damaged["modules"]["1"])
    with pytest.raises(RuntimeError, match=r"the checkpoint's FP8 state of 1 (is damaged|has shapes)"):
        state.load_state_dict(damaged)
    for name, entry in state.state_dict()["modules"].items():
        assert all(
            torch.equal(entry[part], before["modules"][name][part]) for part in ("scale", "amax_history")
        )


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_states_of_older_versions_load_whatever_was_trained(algorithm, length):
    """Longer than the history, with amaxes that grow, shrink and overflow."""
    recipe = {"name": "delayed", "amax_history_len": length, "amax_compute_algo": algorithm, "margin": 1}
    model = trained(0, recipe=recipe)
    for step in range(3 * length):
        x = torch.randn(16, 32) * 10.0 ** (step % 5 - 2)
        model(x * (math.inf if step == length else 1)).square().mean().backward()
        FP8State.of(model).update()
        saved = copy.deepcopy(FP8State.of(model).state_dict())
        FP8State.of(model).load_state_dict(saved)  # with their checksums: whatever it is
        history = torch.stack([e["amax_history"] for e in saved["modules"].values()])
        if step < length or not history.isfinite().all():
            for entry in saved["modules"].values():
                del entry["checksum"]
            FP8State.of(model).load_state_dict(saved)


MALFORMED = {
    "no mapping": lambda s: [],
    "modules are a list": lambda s: {**s, "modules": list(s["modules"])},
    "an entry is a tensor": lambda s: {**s, "modules": dict.fromkeys(s["modules"], torch.zeros(3))},
    "an entry is None": lambda s: {**s, "modules": dict.fromkeys(s["modules"])},
    "the recipe is a word": lambda s: {**s, "recipe": "delayed"},
    "the recipe is None": lambda s: {**s, "recipe": None},
    "modules are None": lambda s: {**s, "modules": None},
}


@pytest.mark.parametrize("form", MALFORMED)
@pytest.mark.parametrize("through", ["FP8State", "training_state"])
def test_states_of_another_form_are_named(form, through):
    model = trained()
    malformed = MALFORMED[form](FP8State.of(model).state_dict())
    with pytest.raises(RuntimeError, match=r"(FP8 state.*is not readable|this is no state)"):
        if through == "FP8State":
            FP8State.of(model).load_state_dict(malformed)
        else:
            foundry_fp8.training_state(model).load_state_dict({"state": ({"fp8": malformed},)})


@pytest.mark.parametrize("state", [None, 3, [], {"state": 1}, {"state": (1, 2)}, {"other": {}}])
def test_what_is_no_state_at_all(state):
    with pytest.raises(RuntimeError, match="no state of foundry_fp8"):
        foundry_fp8.training_state(trained(0)).load_state_dict(state)


@pytest.mark.parametrize("key", ["recipes", "schedule", "events", "batch", "rows", "healthy"])
@pytest.mark.parametrize("value", [None, "x", [1]])
def test_a_guards_state_of_another_form_is_named_and_changes_nothing(key, value):
    model = trained()
    guard = foundry_fp8.DivergenceGuard(model, lambda model, batch: model(batch).sum())
    before = copy.deepcopy(guard.state_dict())
    with pytest.raises(RuntimeError, match="the checkpoint's guard is not readable"):
        guard.load_state_dict({**before, key: value})
    assert guard.state_dict() == before


def test_a_measurements_choice_of_another_form_is_named():
    model = trained(recipe={"name": "measured"})
    state = FP8State.of(model)
    saved = state.state_dict()
    for table in ("{", "[]", '{"0": null}', '{"0": 3, "1": null, "2": null}'):
        with pytest.raises(RuntimeError, match="FP8 state is not readable"):
            state.load_state_dict({**saved, "recipe": {"name": "measured", "table": table}})
        assert state.awaits_choice
